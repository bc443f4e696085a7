"""Compressed payloads of streams: packed by producers, unpacked by readers, which trust none of them.

A frame of zstd states its uncompressed size, and may state any size: fifteen bytes can claim terabytes, and six kilobytes can
become two hundred megabytes. A reader therefore compares the stated size with a bound before it allocates memory, unpacks a frame
without a stated size up to the bound, and bounds the window that a frame requests.
"""

from __future__ import annotations

import threading

import zstandard

from penstock.errors import Unreadable

# A reader may not know that the bound of a stream has been raised, so it always admits at least this size.
LEAST_BOUND = 8 << 20
_WINDOW = 128 << 20


class _PerThread(threading.local):
    """A compressor and a decompressor for each thread, since they are not safe for several threads at once."""

    def __init__(self) -> None:
        self.packer = zstandard.ZstdCompressor()
        self.unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW)


_own = _PerThread()


def pack(payload: bytes) -> bytes:
    """A payload as one frame, which states its size."""
    return _own.packer.compress(payload)


def unpack(stored: bytes, most: int) -> bytes:
    """A payload from its frame.

    Args:
        stored: Frame to unpack.
        most: Largest payload that the stream admits; the bound is at least `LEAST_BOUND`.

    Raises:
        Unreadable: The value is not a frame, or its payload is larger than the bound.
    """
    bound = max(most, LEAST_BOUND)
    try:
        size = zstandard.frame_content_size(stored)
        if size > bound:
            raise Unreadable(f"its stated uncompressed size is {size} bytes, and the limit is {bound}")
        # The decompressor allocates only as much of the maximum as it writes to.
        return _own.unpacker.decompress(stored, max_output_size=0 if size >= 0 else bound)
    except zstandard.ZstdError as error:
        raise Unreadable(f"it is not compressed by zstd: {error}") from None
    except MemoryError:
        raise Unreadable("there is not enough memory to unpack it") from None

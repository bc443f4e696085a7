"""Compressed payloads of streams: packed by producers, unpacked by readers, who trust none of it.

A frame of zstd says how large it becomes, and may say anything: fifteen bytes can claim terabytes, and six kilobytes become two
hundred megabytes. So what a frame says is compared with a bound before anything is allocated, a frame that says nothing is
unpacked up to the bound, and the window that a frame asks for is bounded as well.
"""

from __future__ import annotations

import threading

import zstandard

from penstock.errors import Unreadable

# A reader may not know that somebody raised the bound of a stream meanwhile, so it admits this much in any case.
LEAST_BOUND = 8 << 20
_WINDOW = 128 << 20


class _PerThread(threading.local):
    """A compressor and a decompressor for each thread: they are not for several at once."""

    def __init__(self) -> None:
        self.packer = zstandard.ZstdCompressor()
        self.unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW)


_own = _PerThread()


def pack(payload: bytes) -> bytes:
    """A payload as one frame, which says how large it is."""
    return _own.packer.compress(payload)


def unpack(stored: bytes, most: int) -> bytes:
    """A payload from its frame.

    Args:
        stored: The frame.
        most: The largest payload that the stream admits; at least `LEAST_BOUND` is.

    Raises:
        Unreadable: It is no frame, or becomes larger.
    """
    bound = max(most, LEAST_BOUND)
    try:
        size = zstandard.frame_content_size(stored)
        if size > bound:
            raise Unreadable(f"it says that it becomes {size} bytes, and {bound} is the most")
        # Of what it is given as the most, memory is taken only as far as it is written to.
        return _own.unpacker.decompress(stored, max_output_size=0 if size >= 0 else bound)
    except zstandard.ZstdError as error:
        raise Unreadable(f"it is not compressed by zstd: {error}") from None
    except MemoryError:
        raise Unreadable("it takes more memory to unpack than there is") from None

"""Compressed payloads of streams: packed by producers, unpacked by readers, which trust none of them.

A frame of zstd states its uncompressed size, and may state any size: fifteen bytes can claim terabytes, and six kilobytes can
become two hundred megabytes. A reader therefore compares the stated size with a bound before it allocates memory, unpacks a frame
without a stated size up to the bound, and bounds the window that a frame requests.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

from penstock.core.encryption import is_sealed
from penstock.core.extras import needs
from penstock.errors import Unreadable

# A reader may not know that the bound of a stream has been raised, so it always admits at least this size.
LEAST_BOUND = 8 << 20
_WINDOW = 128 << 20


@cache
def _zstandard() -> Any:
    with needs("compression", "a stream with compression"):
        import zstandard
    return zstandard


class _PerThread(threading.local):
    """A compressor and a decompressor for each thread, since they are not safe for several threads at once."""

    def __init__(self) -> None:
        self.packer = _zstandard().ZstdCompressor()
        self.unpacker = _zstandard().ZstdDecompressor(max_window_size=_WINDOW)


@cache
def _own() -> _PerThread:
    return _PerThread()


def pack(payload: bytes) -> bytes:
    """A payload as one frame, which states its size."""
    packed: bytes = _own().packer.compress(payload)
    return packed


def unpack(stored: bytes, most: int) -> bytes:
    """A payload from its frame.

    Args:
        stored: Frame to unpack.
        most: Largest payload that the stream admits; the bound is at least `LEAST_BOUND`.

    Raises:
        Unreadable: The value is not a frame, or its payload is larger than the bound.

    Returns:
        The payload; what is encrypted, for a reader without keys, as it is.
    """
    bound = max(most, LEAST_BOUND)
    zstandard = _zstandard()
    try:
        size = zstandard.frame_content_size(stored)
        if size > bound:
            raise Unreadable(f"its stated uncompressed size is {size} bytes, and the limit is {bound}")
        # The decompressor allocates only as much of the maximum as it writes to.
        unpacked: bytes = _own().unpacker.decompress(stored, max_output_size=0 if size >= 0 else bound)
        return unpacked
    except zstandard.ZstdError as error:
        if is_sealed(stored):
            return stored
        raise Unreadable(f"it is not compressed by zstd: {error}") from None
    except MemoryError:
        raise Unreadable("there is not enough memory to unpack it") from None

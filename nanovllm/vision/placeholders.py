"""The ids of image placeholders in the engine: a negative number for each exact image.

The style guide rules out numbers with a hidden meaning. Placeholder ids are the agreed exception:
the prefix cache compares the token ids of blocks. If all images had the model's own placeholder id,
two prompts that differ only in their images would share blocks. With an id of its own, an image is
told apart from every other one exactly, and block manager, scheduler, preemption and chunks need
not know of images.

Outside the engine, a placeholder has the model's own id. The worker looks up the embeddings of rows
with negative ids in the request's images. Penalties ignore them, and drafts cannot propose them:
models with images have recurrent layers, for which there are no drafts.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict

from nanovllm.sampling_params import NO_TOKEN

MAX_DIGESTS = 1 << 16


class PlaceholderIds:
    """Assigns an id to each exact image, given its digest. Thread-safe.

    Only the images seen last are known. An image that returns later gets another id: an id is never
    used for two images.
    """

    def __init__(self) -> None:
        self._ids: OrderedDict[bytes, int] = OrderedDict()
        self._next = itertools.count(NO_TOKEN - 1, -1)  # below the other reserved ids
        self._lock = threading.Lock()

    def id_of(self, digest: bytes) -> int:
        with self._lock:
            if digest not in self._ids:
                self._ids[digest] = next(self._next)
            self._ids.move_to_end(digest)
            if len(self._ids) > MAX_DIGESTS:
                self._ids.popitem(last=False)
            return self._ids[digest]

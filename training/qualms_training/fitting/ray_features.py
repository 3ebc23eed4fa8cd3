"""The frozen base on a Ray cluster: the same batches as on this machine, so that the feature cache has the same bytes.

Base and data set are sent through Ray's object store. Images that are decoded when they are used are read by the nodes, so their
paths must be those of a shared file system.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qualms.cluster.connection import ClusterOptions, check_versions, connected, versions
from qualms.cluster.ordered_map import ordered_map
from qualms.errors import first_line
from qualms_training.data.lazy_images import Pixels
from qualms_training.errors import ModelError
from qualms_training.files import fingerprint
from qualms_training.meta.extractor import Extractor
from qualms_training.models.libraries.external import make_torchvision_importable

_PACKAGES = ("qualms", "torch", "torchvision", "numpy", "pillow")
"""packages that determine the features"""
_Arrays: TypeAlias = list[NDArray[np.float32]]


@dataclass(frozen=True)
class RayBatches:
    """Runs an extractor over images on a cluster; used in place of `feature_cache.run_locally`."""

    cluster: ClusterOptions

    def __call__(
        self, extractor: Extractor, images: Pixels, batch: int, device: torch.device
    ) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Logits and taps of each batch, in order. `device` is that of this machine, which computes nothing here."""
        with connected(self.cluster.address) as ray:
            try:
                model = ray.put(extractor.cpu())
            except Exception as error:  # pickling raises many kinds of errors
                raise ModelError(f"The base cannot be sent to the cluster: {first_line(error)}.") from error
            finally:
                extractor.to(device)
            opener = _OpenExtractor(ray, model, ray.put(images), self.cluster, versions(*_PACKAGES), os.getcwd())  # noqa: PTH109
            slices = [slice(start, min(start + batch, len(images))) for start in range(0, len(images), batch)]
            for logits, *taps in ordered_map(ray, slices, opener, self.cluster):
                yield torch.tensor(logits), [torch.tensor(tap) for tap in taps]


@dataclass(frozen=True)
class _OpenExtractor:
    """Opens the base and the data set on a node."""

    ray: Any
    model: Any
    images: Any
    """references to the extractor and to the pixels"""
    cluster: ClusterOptions
    versions: dict[str, str]
    folder: str

    @property
    def key(self) -> str:
        """Identifies base and images."""
        return fingerprint(self.model.hex(), self.images.hex(), self.cluster.threads)

    def open(self) -> Callable[[slice], _Arrays]:
        """The function from positions of images to logits and taps."""
        check_versions(self.versions)
        torch.set_num_threads(self.cluster.threads)  # sums may be rounded otherwise with another number
        device = torch.device("cuda" if self.cluster.gpus else "cpu")
        with suppress(OSError):  # relative paths are those of the command
            os.chdir(self.folder)
        make_torchvision_importable()  # the base may be one of its classes
        extractor, images = self.ray.get([self.model, self.images])
        extractor = extractor.to(device).eval()

        @torch.inference_mode()
        def run(rows: slice) -> _Arrays:
            # By positions: of a slice, `LazyImages` decodes the next images as well, which other nodes get. Of an array in the
            # object store, which cannot be written to, this is a copy.
            pixels = images[np.arange(rows.start, rows.stop)]
            logits, taps = extractor(torch.from_numpy(pixels).to(device))
            return [values.float().cpu().numpy() for values in (logits, *taps)]

        return run

"""Lets the CUDA build of torchvision be imported on the CPU build of torch.

torchvision registers fake (shape-only) kernels for its native operators while it is imported. Its published wheel
keeps these operators in a library that needs CUDA; without it the operators are unknown to torch, and the
registration fails with "operator torchvision::nms does not exist". vLLM imports torchvision for its image models and
would fail with it. Declaring the two schemas first is all that the import needs: nothing here calls the operators.

A .pth file imports this module at interpreter start, so that it also works in the processes that vLLM spawns.
"""

import sys
from types import ModuleType

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
declared: list[object] = []  # torch forgets the schemas of a library object that is collected


class SchemaFinder:
    """Finds nothing; declares the schemas when somebody looks for torchvision, then steps aside.

    Without `importlib.abc` for a base: that costs every interpreter 20 ms, and only the method is asked for.
    """

    def find_spec(self, fullname: str, path: object = None, target: ModuleType | None = None) -> None:
        """Declare the operator schemas just before torchvision is loaded."""
        del path, target
        if fullname != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for schema in SCHEMAS:
            library.define(schema)
        declared.append(library)


sys.meta_path.insert(0, SchemaFinder())

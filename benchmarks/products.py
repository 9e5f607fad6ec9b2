"""The matrix products of a small model's layers for few rows: which kernel reads weights best.

    python benchmarks/products.py

Prints milliseconds for 30 layers of SmolLM2-135M's shapes, weights from memory and not from cache.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
LAYERS = 30


def onednn(weight: Tensor, rows: int) -> Product:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def mkl(weight: Tensor, rows: int) -> Product:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkl._mkl_linear(x, packed, weight, None, rows)


KERNELS: dict[str, Callable[[Tensor, int], Product]] = {
    "oneDNN, packed for 8 rows": lambda weight, rows: onednn(weight, 8),
    "oneDNN, packed for the rows that come": onednn,
    "MKL, packed": mkl,
    "plain": lambda weight, rows: lambda x: torch.nn.functional.linear(x, weight),
    "the weight as the left factor": lambda weight, rows: lambda x: torch.mm(weight, x.T).T,
}


def milliseconds(kernel: Callable[[Tensor, int], Product], rows: int) -> float:
    products = [
        (kernel(torch.randn(outputs, inputs), rows), torch.randn(rows, inputs))
        for _ in range(LAYERS)
        for outputs, inputs in SHAPES
    ]
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        for product, x in products:
            product(x)
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds[1:])


@torch.inference_mode()
def main() -> None:
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; rows: 1, 3, 5")
    for name, kernel in KERNELS.items():
        print(f"{name:40}", *(f"{milliseconds(kernel, rows):7.1f}" for rows in (1, 3, 5)))


if __name__ == "__main__":
    main()

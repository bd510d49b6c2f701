"""Common GPUs: the peak rates of their data sheets, and the fraction of these that training reaches.

Data sheets state peaks of dense operands accumulated in fp32. The reachable fraction of each architecture is fitted to
published measurements of whole networks (tests/oracle/test_catalogue.py lists them all):

    Tesla V100   ResNet-50 at fp32 and fp16                             NVIDIA, DeepLearningExamples, container 21.03
    A100         ResNet-50 at fp32 (TF32) and fp16                      the same source
    RTX 3090     ResNet-50, ResNet-152, VGG-16 at fp16, trained         timm's results, PyTorch 1.12, channels last
    RTX 4090     the same, forward only                                 timm's results, PyTorch 2.4, channels last
    RTX 5090     the same, forward only                                 timm's results, PyTorch 2.9

The forecasts are within 10 % of published trainings and within 25 % of published forward passes.

Cards without a measurement of their own take the fractions of related cards. Cards before Ampere take those of the
V100; data-centre and workstation cards, which accumulate in fp32 at full rate, take those of the A100. TF32 of GeForce
cards is a guess. Matrix products reach more than convolutions: 80 %, as measured on an H200. No AMD card has been
measured.

At fp32, PyTorch's convolutions use TF32 where the GPU has it; its matrix products do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evener.records.profile import DeviceProfile, Precision, Throughput, WidthEfficiency

_TERA, _GIGA, _GIB = 1e12, 1e9, 1 << 30
_BANDWIDTH = 0.9
"""The fraction of the sheet's memory bandwidth that a large copy reaches."""
_DRIVER_MEMORY_DIVISOR = 16
"""The driver takes one part in this many of the memory."""
NARROW = (WidthEfficiency(filters=1, efficiency=1 / 32), WidthEfficiency(filters=32, efficiency=1.0))
"""Matrix kernels work on tiles of at least 32 columns; with fewer filters the rest of a tile is wasted."""
SPREAD = 0.013
"""GPUs of one kind differ by 8 % from the slowest to the fastest (Sinha et al., SC 2022), about six standard
deviations.
"""
PASS_SECONDS = 34e-6
"""Fixed seconds of a layer's pass under PyTorch, fitted to two networks of different depth on a V100 (abci.py)."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Fractions of a data sheet's peak rates that training reaches on one architecture.

    Attributes:
        plain: fp64 and fp32 without tensor cores.
        tf32: fp32 convolutions on tensor cores; 0 where there are none.
        half: fp16 and bf16 convolutions.
        matmul: fp16 and bf16 matrix products.
        has_bf16: whether bf16 is as fast as fp16.
    """

    plain: float = 0.85
    tf32: float = 0.0
    half: float
    matmul: float = 0.8
    has_bf16: bool = True


_VOLTA = Efficiency(half=0.57, has_bf16=False)
_AMPERE = Efficiency(tf32=0.23, half=0.47)
_GEFORCE_30 = Efficiency(tf32=0.6, half=0.85)
_GEFORCE_40 = Efficiency(tf32=0.6, half=0.75)
_GEFORCE_50 = Efficiency(tf32=0.6, half=0.6)


@dataclass(frozen=True)
class Card:
    """A GPU according to its data sheet.

    Attributes:
        model: name of the card.
        units: number of multiprocessors.
        gib: memory in GiB.
        bandwidth: memory bandwidth in GB/s.
        fp64, fp32: TFLOP/s without tensor cores.
        tf32: TFLOP/s of dense TF32; 0 where there is none.
        half: TFLOP/s of dense fp16, accumulated in fp32.
        efficiency: fractions of these rates that training reaches.
    """

    model: str
    units: int
    gib: int
    bandwidth: float
    fp64: float
    fp32: float
    tf32: float
    half: float
    efficiency: Efficiency

    def profile(self, node: str = "node", index: int = 0) -> DeviceProfile:
        """Return the card as device `cuda:INDEX` of `node`."""
        return DeviceProfile(
            node=node,
            device=f"cuda:{index}",
            model=self.model,
            cores=self.units,
            memory_bytes=self.gib * _GIB,
            usable_memory_bytes=self.gib * _GIB * (_DRIVER_MEMORY_DIVISOR - 1) // _DRIVER_MEMORY_DIVISOR,
            bandwidth=_BANDWIDTH * self.bandwidth * _GIGA,
            throughputs=self._throughputs(),
            pass_seconds=PASS_SECONDS,
            widths=NARROW,
            spread=SPREAD,
        )

    def _throughputs(self) -> tuple[Throughput, ...]:
        efficiency = self.efficiency
        fp64, fp32 = self.fp64 * efficiency.plain, self.fp32 * efficiency.plain
        half = self.half * efficiency.matmul, self.half * efficiency.half
        rates: dict[Precision, tuple[float, float]] = {
            "fp64": (fp64, fp64),
            "fp32": (fp32, max(fp32, self.tf32 * efficiency.tf32)),
            "fp16": half,
        }
        if efficiency.has_bf16:
            rates["bf16"] = half
        return tuple(
            Throughput(precision=precision, matmul_flops=matmul * _TERA, conv_flops=conv * _TERA)
            for precision, (matmul, conv) in rates.items()
        )


# fmt: off
CARDS: Mapping[str, Card] = {
    #                  model                  units  GiB  GB/s   fp64   fp32    tf32    half  efficiency
    "gtx1080ti": Card("GeForce GTX 1080 Ti",     28,  11,  484,  0.35,  11.3,    0.0,   0.18, _VOLTA),
    "p100":      Card("Tesla P100-SXM2-16GB",    56,  16,  732,  5.3,   10.6,    0.0,   21.2, _VOLTA),
    "v100":      Card("Tesla V100-SXM2-16GB",    80,  16,  900,  7.8,   15.7,    0.0,  125.0, _VOLTA),
    "v100-32":   Card("Tesla V100-SXM2-32GB",    80,  32,  900,  7.8,   15.7,    0.0,  125.0, _VOLTA),
    "t4":        Card("Tesla T4",                40,  16,  320,  0.25,   8.1,    0.0,   65.0, _VOLTA),
    "rtx2060":   Card("GeForce RTX 2060",        30,   6,  336,  0.2,    6.5,    0.0,   25.8, _VOLTA),
    "rtx2070":   Card("GeForce RTX 2070",        36,   8,  448,  0.23,   7.5,    0.0,   29.9, _VOLTA),
    "rtx2080ti": Card("GeForce RTX 2080 Ti",     68,  11,  616,  0.42,  13.4,    0.0,   53.8, _VOLTA),
    "rtx3060":   Card("GeForce RTX 3060",        28,  12,  360,  0.2,   12.7,   12.7,   25.5, _GEFORCE_30),
    "rtx3070":   Card("GeForce RTX 3070",        46,   8,  448,  0.32,  20.3,   20.3,   40.6, _GEFORCE_30),
    "rtx3080":   Card("GeForce RTX 3080",        68,  10,  760,  0.47,  29.8,   29.8,   59.5, _GEFORCE_30),
    "rtx3090":   Card("GeForce RTX 3090",        82,  24,  936,  0.56,  35.6,   35.6,   71.0, _GEFORCE_30),
    "a4000":     Card("RTX A4000",               48,  16,  448,  0.3,   19.2,   38.3,   76.7, _AMPERE),
    "a5000":     Card("RTX A5000",               64,  24,  768,  0.43,  27.8,   55.6,  111.1, _AMPERE),
    "a6000":     Card("RTX A6000",               84,  48,  768,  0.6,   38.7,   77.4,  154.8, _AMPERE),
    "a10":       Card("A10",                     72,  24,  600,  0.49,  31.2,   62.5,  125.0, _AMPERE),
    "a30":       Card("A30",                     56,  24,  933,  5.2,   10.3,   82.0,  165.0, _AMPERE),
    "a40":       Card("A40",                     84,  48,  696,  0.58,  37.4,   74.8,  149.7, _AMPERE),
    "a100":      Card("A100-SXM4-40GB",         108,  40, 1555,  9.7,   19.5,  156.0,  312.0, _AMPERE),
    "a100-80":   Card("A100-SXM4-80GB",         108,  80, 2039,  9.7,   19.5,  156.0,  312.0, _AMPERE),
    "rtx4060":   Card("GeForce RTX 4060",        24,   8,  272,  0.24,  15.1,   15.1,   30.2, _GEFORCE_40),
    "rtx4070":   Card("GeForce RTX 4070",        46,  12,  504,  0.46,  29.1,   29.1,   58.3, _GEFORCE_40),
    "rtx4080":   Card("GeForce RTX 4080",        76,  16,  717,  0.76,  48.7,   48.7,   97.5, _GEFORCE_40),
    "rtx4090":   Card("GeForce RTX 4090",       128,  24, 1008,  1.3,   82.6,   82.6,  165.2, _GEFORCE_40),
    "l4":        Card("L4",                      58,  24,  300,  0.47,  30.3,   60.5,  121.0, _AMPERE),
    "l40s":      Card("L40S",                   142,  48,  864,  1.4,   91.6,  183.0,  362.0, _AMPERE),
    "a6000-ada": Card("RTX 6000 Ada",           142,  48,  960,  1.4,   91.1,  182.0,  364.0, _AMPERE),
    "h100-pcie": Card("H100-PCIe-80GB",         114,  80, 2000, 26.0,   51.0,  378.0,  756.0, _AMPERE),
    "h100":      Card("H100-SXM5-80GB",         132,  80, 3352, 34.0,   67.0,  494.0,  989.0, _AMPERE),
    "h200":      Card("H200-SXM",               132, 140, 4800, 34.0,   67.0,  494.0,  989.0, _AMPERE),
    "rtx5070":   Card("GeForce RTX 5070",        48,  12,  672,  0.48,  30.9,   30.9,   61.7, _GEFORCE_50),
    "rtx5080":   Card("GeForce RTX 5080",        84,  16,  960,  0.88,  56.3,   56.3,  112.6, _GEFORCE_50),
    "rtx5090":   Card("GeForce RTX 5090",       170,  32, 1792,  1.6,  104.8,  104.8,  209.5, _GEFORCE_50),
    # GeForce cards and laptops, by cores and boost clock (docs/machines.md)
    "gtx1060":          Card("GeForce GTX 1060 6GB",           10,   6,  192,  0.14,   4.4,   0.0,   0.07, _VOLTA),
    "gtx1060-3":        Card("GeForce GTX 1060 3GB",            9,   3,  192,  0.12,   3.9,   0.0,   0.06, _VOLTA),
    "gtx1070":          Card("GeForce GTX 1070",               15,   8,  256,  0.20,   6.5,   0.0,   0.10, _VOLTA),
    "gtx1070ti":        Card("GeForce GTX 1070 Ti",            19,   8,  256,  0.26,   8.2,   0.0,   0.13, _VOLTA),
    "gtx1080":          Card("GeForce GTX 1080",               20,   8,  320,  0.28,   8.9,   0.0,   0.14, _VOLTA),
    "gtx1650":          Card("GeForce GTX 1650",               14,   4,  128,  0.09,   3.0,   0.0,   5.97, _VOLTA),
    "gtx1650s":         Card("GeForce GTX 1650 SUPER",         20,   4,  192,  0.14,   4.4,   0.0,   8.83, _VOLTA),
    "gtx1660":          Card("GeForce GTX 1660",               22,   6,  192,  0.16,   5.0,   0.0,  10.05, _VOLTA),
    "gtx1660s":         Card("GeForce GTX 1660 SUPER",         22,   6,  336,  0.16,   5.0,   0.0,  10.05, _VOLTA),
    "gtx1660ti":        Card("GeForce GTX 1660 Ti",            24,   6,  288,  0.17,   5.4,   0.0,  10.87, _VOLTA),
    "rtx2060s":         Card("GeForce RTX 2060 SUPER",         34,   8,  448,  0.22,   7.2,   0.0,  28.72, _VOLTA),
    "rtx2070s":         Card("GeForce RTX 2070 SUPER",         40,   8,  448,  0.28,   9.1,   0.0,  36.25, _VOLTA),
    "rtx2080":          Card("GeForce RTX 2080",               46,   8,  448,  0.31,  10.1,   0.0,  40.27, _VOLTA),
    "rtx2080s":         Card("GeForce RTX 2080 SUPER",         48,   8,  496,  0.35,  11.2,   0.0,  44.61, _VOLTA),
    "rtx3050":          Card("GeForce RTX 3050 8GB",           20,   8,  224,  0.14,   9.1,   9.1,  18.20, _GEFORCE_30),
    "rtx3060ti":        Card("GeForce RTX 3060 Ti",            38,   8,  448,  0.25,  16.2,  16.2,  32.39, _GEFORCE_30),
    "rtx3070ti":        Card("GeForce RTX 3070 Ti",            48,   8,  608,  0.34,  21.7,  21.7,  43.50, _GEFORCE_30),
    "rtx3080ti":        Card("GeForce RTX 3080 Ti",            80,  12,  912,  0.53,  34.1,  34.1,  68.20, _GEFORCE_30),
    "rtx3090ti":        Card("GeForce RTX 3090 Ti",            84,  24, 1008,  0.62,  40.0,  40.0,  79.99, _GEFORCE_30),
    "rtx4060ti":        Card("GeForce RTX 4060 Ti 8GB",        34,   8,  288,  0.34,  22.1,  22.1,  44.13, _GEFORCE_40),
    "rtx4060ti-16":     Card("GeForce RTX 4060 Ti 16GB",       34,  16,  288,  0.34,  22.1,  22.1,  44.13, _GEFORCE_40),
    "rtx4070s":         Card("GeForce RTX 4070 SUPER",         56,  12,  504,  0.55,  35.5,  35.5,  70.96, _GEFORCE_40),
    "rtx4070ti":        Card("GeForce RTX 4070 Ti",            60,  12,  504,  0.63,  40.1,  40.1,  80.18, _GEFORCE_40),
    "rtx4070tis":       Card("GeForce RTX 4070 Ti SUPER",      66,  16,  672,  0.69,  44.1,  44.1,  88.20, _GEFORCE_40),
    "rtx4080s":         Card("GeForce RTX 4080 SUPER",         80,  16,  736,  0.82,  52.2,  52.2, 104.45, _GEFORCE_40),
    "rtx2060-laptop":   Card("GeForce RTX 2060 Laptop",        30,   6,  336,  0.14,   4.6,   0.0,  18.43, _VOLTA),
    "rtx3050-laptop":   Card("GeForce RTX 3050 Laptop 4GB",    16,   4,  192,  0.11,   7.1,   7.1,  14.25, _GEFORCE_30),
    "rtx3050ti-laptop": Card("GeForce RTX 3050 Ti Laptop",     20,   4,  192,  0.14,   8.7,   8.7,  17.36, _GEFORCE_30),
    "rtx3060-laptop":   Card("GeForce RTX 3060 Laptop",        30,   6,  336,  0.20,  13.1,  13.1,  26.16, _GEFORCE_30),
    "rtx3070-laptop":   Card("GeForce RTX 3070 Laptop",        40,   8,  448,  0.26,  16.6,  16.6,  33.18, _GEFORCE_30),
    "rtx3080-laptop":   Card("GeForce RTX 3080 Laptop 16GB",   48,  16,  448,  0.33,  21.0,  21.0,  42.02, _GEFORCE_30),
    "rtx3080ti-laptop": Card("GeForce RTX 3080 Ti Laptop",     58,  16,  512,  0.37,  23.6,  23.6,  47.22, _GEFORCE_30),
    "rtx4050-laptop":   Card("GeForce RTX 4050 Laptop",        20,   6,  192,  0.19,  12.1,  12.1,  24.27, _GEFORCE_40),
    "rtx4060-laptop":   Card("GeForce RTX 4060 Laptop",        24,   8,  256,  0.23,  14.6,  14.6,  29.12, _GEFORCE_40),
    "rtx4070-laptop":   Card("GeForce RTX 4070 Laptop",        36,   8,  256,  0.31,  20.0,  20.0,  40.09, _GEFORCE_40),
    "rtx4080-laptop":   Card("GeForce RTX 4080 Laptop",        58,  12,  432,  0.53,  33.9,  33.9,  67.71, _GEFORCE_40),
    "rtx4090-laptop":   Card("GeForce RTX 4090 Laptop",        76,  16,  576,  0.62,  39.7,  39.7,  79.38, _GEFORCE_40),
    "b200":      Card("B200-SXM",               148, 179, 8000, 37.0,   75.0, 1125.0, 2250.0, _AMPERE),
}
# fmt: on
"""The cards by the names that `evener plan --machines` accepts."""

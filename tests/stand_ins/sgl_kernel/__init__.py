"""A stand-in for SGLang's kernels on the CPU, where the package has none: SGLang imports it and computes in torch. All
functions fail when called, except MurmurHash3, which seeded draws use."""

import importlib.machinery
import sys
import types

import torch

__version__ = "0.4.10"


class _Names:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    scalar_types = _Names()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def kernel(*args, **options):
            raise NotImplementedError(f"{self.__name__}.{name} is a stand-in")

        return kernel


class _Finder:
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())
sys.modules[__name__].__class__ = _Module


_LOW = 0xFFFFFFFF


def _turn(value, by):
    return ((value << by) | (value >> (32 - by))) & _LOW


def _mix(hashed, block):
    block = _turn((block * 0xCC9E2D51) & _LOW, 15)
    hashed = _turn(hashed ^ ((block * 0x1B873593) & _LOW), 13)
    return (hashed * 5 + 0xE6546B64) & _LOW


def _murmur_hash32(seed, positions, columns):
    """Hash each row's seed and position and each column: uint32 [rows, columns]."""
    seed = seed.to(torch.int64)
    hashed = torch.zeros_like(seed)
    for block in (seed & _LOW, (seed >> 32) & _LOW, positions.to(torch.int64) & _LOW):
        hashed = _mix(hashed, block)
    hashed = _mix(hashed[:, None], columns.to(torch.int64)[None] & _LOW) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & _LOW
    return (hashed ^ (hashed >> 16)).to(torch.uint32)


_library = torch.library.Library("sgl_kernel", "FRAGMENT")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
_library.impl("murmur_hash32_cpu", _murmur_hash32, "CPU")

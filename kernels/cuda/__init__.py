"""CUDA C++ sources, compiled at run time by NVRTC; see `cuda_loader`."""

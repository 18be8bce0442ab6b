// How a function is marked that loops are made of: compiled into its caller, and by nvcc for the GPU as well.
#pragma once

#if defined(__CUDACC__)
#define LOHAN_INLINE __host__ __device__ __forceinline__
#else
#define LOHAN_INLINE inline __attribute__((always_inline))
#endif

#if defined(__CUDA_ARCH__)
#define LOHAN_UNROLL _Pragma("unroll")   // so that arrays stay in registers
#else
#define LOHAN_UNROLL
#endif

// The functions of torch's library that are used here: small matrix products on the processor's matrix units.
//
// How the library reads an operand depends on the processor, and its headers do not tell (block_trial.h finds it).
#pragma once

#include <ATen/Context.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../cpu/kernel.h"

namespace mz {
namespace borrowed {

template <typename T> struct Torch;
template <> struct Torch<float> { using type = float; };
template <> struct Torch<bf16> { using type = at::BFloat16; };
template <> struct Torch<fp16> { using type = at::Half; };

// Whether to try products of T: the processor has instructions for T, and the library is not switched off.
template <typename T> bool offered() {
#if defined(__AVX512F__)
  if (std::is_same<T, bf16>::value && !__builtin_cpu_supports("avx512bf16")) return false;
#elif defined(__AVX2__)
  if (sizeof(T) == 2) return false;
#else
  return false;
#endif
  return at::globalContext().userEnabledMkldnn();
}

// C [m, n] (+)= A [m, k] B [k, n]; throws where the library has no such product. For 16-bit types "vnni" asks for the
// matrix units: without it the library multiplies in 16 bits and rounds every product.
template <typename T>
MZ_INLINE void product(int64_t m, int64_t n, int64_t k, const T* a, int64_t lda, const T* b, int64_t ldb, float* c, int64_t ldc, bool add) {
  using V = typename Torch<T>::type;
  at::native::cpublas::brgemm(m, n, k, lda, ldb, ldc, add, reinterpret_cast<const V*>(a), reinterpret_cast<const V*>(b), c,
                              /*is_vnni=*/sizeof(T) == 2);
}

template <typename T> MZ_INLINE void done() { at::native::cpublas::brgemm_release(sizeof(T) == 2); }

}  // namespace borrowed
}  // namespace mz

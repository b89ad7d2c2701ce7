// The operators bf16kit::MatMul… and MatMulBf16…: y = activation(x · w + bias), w in bf16, for one weight or two or three
// that share x. MatMulBf16… round x to bf16 first; both sum in fp32.
//
//   inputs      x [..., k] fp32; each w bf16, a constant of k * n elements; each bias [n] fp32, optional
//   outputs     each y [..., n] fp32
//   attributes  k          int, the weights' rows
//               n          int, the weight's columns; n1, n2, n3 where there are several
//               layout     "panels" or "transposed": how the weight is stored (weight.h); several are in panels
//               activation "none", "relu", "gelu", "gelu_tanh", "silu"; several have none
#pragma once

#include "ort/abi.h"
#include "gemm/parallel.h"

namespace bf16kit {

// What the attribute `activation` may be.
constexpr const char* kActivations[] = {"none", "relu", "gelu", "gelu_tanh", "silu"};

abi::Status* create_product(const abi::Api*, const abi::KernelInfo*, size_t weights, Arithmetic, void** created) noexcept;
abi::Status* run_product(void* created, abi::KernelContext*) noexcept;
void destroy_product(void* created) noexcept;

}  // namespace bf16kit

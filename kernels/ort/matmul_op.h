// The operators bf16kit::MatMul… and MatMulBf16…: y = activation(x · w + bias) with w in bf16, for one, two or three weights
// that share x. MatMulBf16… rounds x to bf16 first. Both sum in fp32.
//
//   inputs      x [..., k] fp32; each w bf16, a constant of k * n elements; each bias [n] fp32, optional
//   outputs     each y [..., n] fp32
//   attributes  k          int, the weights' rows
//               n          int, the weight's columns; n1, n2, n3 if there are several weights
//               layout     "panels" or "transposed": how the weight is stored (weight.h); several are always in panels
//               activation "none", "relu", "gelu", "gelu_tanh", "silu", "relu6"; several weights have no activation
#pragma once

#include "ort/abi.h"
#include "gemm/parallel.h"

namespace bf16kit {

// The values of the attribute `activation`.
constexpr const char* kActivations[] = {"none", "relu", "gelu", "gelu_tanh", "silu", "relu6"};

abi::Status* create_product(const abi::Api*, const abi::KernelInfo*, size_t weights, Arithmetic, void** created) noexcept;
abi::Status* run_product(void* created, abi::KernelContext*) noexcept;
void destroy_product(void* created) noexcept;

}  // namespace bf16kit

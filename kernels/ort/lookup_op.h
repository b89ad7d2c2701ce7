// The operators bf16kit::Gather_panels…: look up rows of a table. It is stored in panels because it is also a product's weight.
//
//   inputs      indices [...] int64, from -n to n - 1; the table bf16, a constant of k * n elements in panels
//   output      rows [..., k] fp32
//   attributes  k, n     int, the width of a row and the number of rows: the rows and columns of the product's weight
#pragma once

#include "ort/abi.h"

namespace bf16kit {

abi::Status* create_lookup(const abi::Api*, const abi::KernelInfo*, void** created) noexcept;
abi::Status* run_lookup(void* created, abi::KernelContext*) noexcept;
void destroy_lookup(void* created) noexcept;

}  // namespace bf16kit

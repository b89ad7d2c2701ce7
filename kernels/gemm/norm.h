// A residual sum and its normalisation: s = x + skip, y = (s - mean of s) / sqrt(variance of s + epsilon) * scale + bias.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/parts.h"

namespace bf16kit {

struct Path;

struct Norm {
  const float *x, *skip;       // [rows, width]
  const float *scale, *bias;   // [width]; the bias may be null
  int64_t rows, width;
  float epsilon;
  float* y;    // [rows, width]
  float* sum;  // s, [rows, width]; may be null
};

// Computes y, and s where it is wanted, with `run(threads, …)`.
void normalise(const Norm& norm, const Path& path, RunParts run, void* threads);

}  // namespace bf16kit

// A residual sum and its normalisation. With s = x + skip, or s = x where there is no skip:
//     layer norm:  y = (s - mean of s) / sqrt(variance of s + epsilon) * scale + bias
//     RMS norm:    y = s / sqrt(mean of s^2 + epsilon) * scale + bias
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/parts.h"

namespace bf16kit {

struct Path;

enum class NormKind { kLayer, kRms };

struct Norm {
  NormKind kind;
  const float *x, *skip;      // [rows, width]; skip may be null in an RMS norm
  const float *scale, *bias;  // [width]; the bias may be null
  int64_t rows, width;
  float epsilon;
  float* y;    // [rows, width]
  float* sum;  // s, [rows, width]; may be null, and must be if skip is
};

// Computes y, and s if `sum` is not null, with `run(threads, …)`.
void normalise(const Norm& norm, const Path& path, RunParts run, void* threads);

}  // namespace bf16kit

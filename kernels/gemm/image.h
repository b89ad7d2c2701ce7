// Convolutions over images in channels-last layout, x [batch, height, width, channels]. One over a sequence has height 1.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/parts.h"
#include "gemm/weight.h"

namespace bf16kit {

struct Path;

// An image, and the windows of it that a convolution multiplies: each pixel of the output has one. A pair is down and across.
// A dense convolution is a Product with an image, whose rows are the windows, [kernel[0], kernel[1], channels ÷ groups] each.
struct Image {
  int64_t height, width, channels;
  int64_t out_height, out_width;
  int64_t kernel[2], stride[2], dilation[2];
  int64_t pad[2];  // before the first row and column; what a window has outside of the image is zero
  int64_t groups = 1;  // of a dense convolution: as many columns of each read its channels alone
};

// A convolution of each channel by itself: with the taps t of a pixel's window in order, leaving out those that are outside of
// the image,   sum = 0;  for each t:  sum = fma(x[t, c], w[t, c], sum);   y = activation(sum + bias[c])
// in fp32, with w and the bias in fp32 as well.
struct Depthwise {
  const float* x;
  int64_t batch;
  Image image;
  const float* w;     // [kernel[0], kernel[1], channels]
  const float* bias;  // [channels]
  Activation activation;
  float* y;  // [batch, out_height, out_width, channels]
};

// The fewest channels that every path can compute: the lanes of the widest vector.
constexpr int64_t kFewestChannels = 16;

// Computes y with `run(threads, …)`. Requires kFewestChannels.
void convolve(const Depthwise& depthwise, const Path& path, RunParts run, void* threads);

}  // namespace bf16kit

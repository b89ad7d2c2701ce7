// The operators bf16kit::Conv…, ConvBf16… and ConvDepthwise…: y = activation(Conv(x, w) + bias) over images or sequences in
// channels-last layout. ConvBf16… rounds x to bf16 first. All sum in fp32.
//
//   inputs      x [batch, (height,) width, channels] fp32; w bf16, a constant; the bias [n] fp32
//               w is [k, n] in panels, k = (kernel height ·) kernel width · channels in this order;
//               in ConvDepthwise… it is [channels, 1, (kernel height,) kernel width], and n = channels, at least 16
//   output      y [batch, (height,) width, n] fp32
//   attributes  channels, n  int
//               kernel_shape, strides, dilations  ints, one or two; pads  ints, one or two before, then as many behind
//
// The name is Conv[Bf16]_FORM[_ACTIVATION] for each form of panels, or ConvDepthwise[_ACTIVATION].
//
// ConvBlock[Bf16]_FORM_FORM[_ACTIVATION] is an inverted bottleneck: a dense convolution of single pixels, a depthwise one, both
// with the activation, and another of single pixels. Its inputs are x, the three weights, the three biases; its attributes are
// those of the three, with 1, 2 or 3 behind the name.
#pragma once

#include <cstddef>

#include "ort/abi.h"

namespace bf16kit {

constexpr size_t kConvActivations = 4;  // none, relu, silu, relu6
constexpr size_t kConvOperators = (2 * (3 + 3 * 3) + 1) * kConvActivations;

// Returns operator `index`, which lives as long as the program.
const abi::CustomOp* conv_operator_at(size_t index);

}  // namespace bf16kit

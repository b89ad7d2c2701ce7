#include "ort/conv_op.h"

#include <cstdio>
#include <cstring>
#include <memory>
#include <new>

#include "gemm/parallel.h"
#include "ort/custom_op.h"
#include "ort/matmul_op.h"
#include "ort/node.h"
#include "ort/status.h"

namespace bf16kit {
namespace {

using namespace abi;

constexpr size_t kX = 0, kW = 1, kBias = 2;  // inputs

struct Operator {
  CustomOp op;  // the first member, because ONNX Runtime passes its address back
  char name[40];
  bool depthwise;
  Arithmetic arithmetic;
  Activation activation;
};

const Operator& of(const CustomOp* op) { return *reinterpret_cast<const Operator*>(op); }

struct Node {
  const Api* api;
  const Path* path;
  const Operator* op;
  Weight weight;
  size_t rank;  // 1 for sequences, 2 for images
  Image image;  // without the sizes that depend on x
  int64_t pad_after[2];
  std::unique_ptr<float[]> taps;  // the weight of a depthwise convolution, [kernel, channels]
};

// Returns how many integers an attribute has; 0 if it is missing or of another type.
size_t count_ints(const Api* api, const KernelInfo* info, const char* name) {
  size_t count = 0;
  Status* status =
      call<Status*>(api, kKernelInfoGetAttributeArrayInt64, info, name, static_cast<int64_t*>(nullptr), &count);
  if (status == nullptr) return count;
  call<void>(api, kReleaseStatus, status);
  return 0;
}

// Reads an attribute of `count` integers from `least` to INT32_MAX.
Status* read_ints(const Api* api, const KernelInfo* info, const char* name, int64_t least, int64_t* values, size_t count) {
  size_t found = count_ints(api, info, name);
  if (found != count) {
    return error(api, kInvalidGraph, "attribute %s has %zu integers; it must have %zu, as many as kernel_shape needs", name,
                 found, count);
  }
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelInfoGetAttributeArrayInt64, info, name, values, &found));
  for (size_t i = 0; i < count; ++i) {
    if (values[i] >= least && values[i] <= INT32_MAX) continue;
    return error(api, kInvalidGraph, "integer %zu of attribute %s is %lld; it must be from %lld to %d", i, name,
                 static_cast<long long>(values[i]), static_cast<long long>(least), INT32_MAX);
  }
  return nullptr;
}

// Reads the sizes of the windows. What a sequence has only one of is for the direction across.
Status* read_windows(const Api* api, const KernelInfo* info, Node& node) {
  Image& image = node.image;
  const size_t rank = node.rank = count_ints(api, info, "kernel_shape");
  if (rank < 1 || rank > 2) {
    return error(api, kInvalidGraph, "attribute kernel_shape has %zu integers; it must have one or two, because only sequences"
                 " and images are supported", rank);
  }
  const size_t first = 2 - rank;
  int64_t pads[4] = {};
  image.kernel[0] = image.stride[0] = image.dilation[0] = 1;
  BF16KIT_RETURN_IF_ERROR(read_ints(api, info, "kernel_shape", 1, image.kernel + first, rank));
  BF16KIT_RETURN_IF_ERROR(read_ints(api, info, "strides", 1, image.stride + first, rank));
  BF16KIT_RETURN_IF_ERROR(read_ints(api, info, "dilations", 1, image.dilation + first, rank));
  BF16KIT_RETURN_IF_ERROR(read_ints(api, info, "pads", 0, pads, 2 * rank));
  std::memcpy(image.pad + first, pads, sizeof(int64_t) * rank);
  std::memcpy(node.pad_after + first, pads + rank, sizeof(int64_t) * rank);
  return nullptr;
}

Status* read_taps(const Api* api, Node& node) {
  const int64_t channels = node.image.channels, taps = node.weight.k;
  if (channels != node.weight.n || channels < kFewestChannels) {
    return error(api, kInvalidGraph, "channels = %lld and n = %lld of a depthwise convolution; they must be equal, and at"
                 " least %lld", static_cast<long long>(channels), static_cast<long long>(node.weight.n),
                 static_cast<long long>(kFewestChannels));
  }
  node.taps.reset(new (std::nothrow) float[static_cast<size_t>(taps * channels)]);
  if (node.taps == nullptr) return error(api, kFail, "out of memory");
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t t = 0; t < taps; ++t) {
      const uint32_t bits = static_cast<uint32_t>(node.weight.data[c * taps + t]) << 16;
      std::memcpy(&node.taps[static_cast<size_t>(t * channels + c)], &bits, sizeof bits);
    }
  }
  return nullptr;
}

Status* create(const CustomOp* op, const Api* api, const KernelInfo* info, void** created) noexcept {
  std::unique_ptr<Node> node(new (std::nothrow) Node{});
  if (node == nullptr) return error(api, kFail, "out of memory");
  node->api = api;
  node->op = &of(op);
  node->path = choose_path(node->op->arithmetic);
  if (node->path == nullptr) {
    return error(api, kFail, "BF16KIT_KERNEL_PATH names no code path that this processor can run; unset it");
  }
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, "channels", node->image.channels));
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, "n", node->weight.n));
  BF16KIT_RETURN_IF_ERROR(read_windows(api, info, *node));
  // Each factor is at most INT32_MAX, so no product of two of them overflows.
  const int64_t taps = node->image.kernel[0] * node->image.kernel[1];
  node->weight.k = taps;
  if (!node->op->depthwise && __builtin_mul_overflow(taps, node->image.channels, &node->weight.k)) {
    return error(api, kInvalidGraph, "a window of %lld pixels is too large", static_cast<long long>(taps));
  }
  int64_t elements = 0;
  if (__builtin_mul_overflow(node->weight.k, node->weight.n, &elements)) {
    return error(api, kInvalidGraph, "a weight of k = %lld and n = %lld is too large", static_cast<long long>(node->weight.k),
                 static_cast<long long>(node->weight.n));
  }
  BF16KIT_RETURN_IF_ERROR(read_weight(api, info, kW, node->weight));
  if (node->op->depthwise) BF16KIT_RETURN_IF_ERROR(read_taps(api, *node));
  *created = node.release();
  return nullptr;
}

void destroy(void* created) noexcept { delete static_cast<Node*>(created); }

// Sets the sizes of x and y in `image`, and the dimensions of y in `shape`, which are those of x before.
Status* read_sizes(const Node& node, Shape& shape, Image& image) {
  const size_t rank = node.rank;
  if (shape.count != rank + 2 || shape.dims[rank + 1] != image.channels) {
    return error(node.api, kInvalidArgument, "x has %zu dimensions, the last of %lld; it must have %zu, the last of %lld channels",
                 shape.count, static_cast<long long>(shape.count == 0 ? 0 : shape.dims[shape.count - 1]), rank + 2,
                 static_cast<long long>(image.channels));
  }
  const int64_t sizes[2] = {rank == 1 ? 1 : shape.dims[1], shape.dims[rank]};
  int64_t out[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t window = (image.kernel[i] - 1) * image.dilation[i] + 1, padded = sizes[i] + image.pad[i] + node.pad_after[i];
    if (padded < window) {
      return error(node.api, kInvalidArgument, "x is %lld pixels %s with its padding; a window is %lld",
                   static_cast<long long>(padded), i == 0 ? "high" : "wide", static_cast<long long>(window));
    }
    out[i] = (padded - window) / image.stride[i] + 1;
  }
  image.height = sizes[0], image.width = sizes[1];
  image.out_height = out[0], image.out_width = out[1];
  if (rank == 2) shape.dims[1] = out[0];
  shape.dims[rank] = out[1];
  shape.dims[rank + 1] = node.weight.n;
  return nullptr;
}

// Whether the windows are the pixels themselves, so that x is a matrix.
bool pointwise(const Image& image) {
  for (int i = 0; i < 2; ++i) {
    if (image.kernel[i] != 1 || image.stride[i] != 1) return false;
  }
  return image.out_height == image.height && image.out_width == image.width;
}

Status* run(void* created, KernelContext* context) noexcept {
  const Node& node = *static_cast<const Node*>(created);
  const Api* api = node.api;
  Image image = node.image;
  Shape shape, bias_shape;
  void *x = nullptr, *bias = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, kX, shape, &x));
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, kBias, bias_shape, &bias));
  BF16KIT_RETURN_IF_ERROR(check_bias(api, bias_shape, node.weight.n));
  const int64_t batch = shape.count == 0 ? 0 : shape.dims[0];
  BF16KIT_RETURN_IF_ERROR(read_sizes(node, shape, image));
  float* y = nullptr;
  BF16KIT_RETURN_IF_ERROR(make_output(api, context, 0, shape, &y));
  Threads threads = {api, context, nullptr};
  if (node.op->depthwise) {
    const Depthwise depthwise = {static_cast<const float*>(x), batch,       image, node.taps.get(),
                                 static_cast<const float*>(bias), node.op->activation, y};
    convolve(depthwise, *node.path, run_parts, &threads);
    return threads.status;
  }
  Product product = {static_cast<const float*>(x), batch * image.out_height * image.out_width, node.weight,
                     static_cast<const float*>(bias), node.op->activation, node.op->arithmetic, y, 0};
  if (!pointwise(image)) product.image = &image;
  const bool done = multiply(&product, 1, *node.path, run_parts, &threads);
  if (threads.status != nullptr) return threads.status;
  return done ? nullptr : error(api, kFail, "out of memory while copying windows of x");
}

CustomOp describe() {
  CustomOp op = custom_op_of_floats<Operator>([](const CustomOp*) noexcept -> size_t { return 3; },
                                              [](const CustomOp*) noexcept -> size_t { return 1; });
  op.GetInputType = [](const CustomOp*, size_t i) noexcept -> int { return i == kW ? kBfloat16 : kFloat; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = run;
  op.KernelDestroy = destroy;
  return op;
}

// The names must be those in converter/fuse/convolve.py.
struct Operators {
  Operator all[kConvOperators];

  Operators() {
    static constexpr Activation kAll[kConvActivations] = {Activation::kNone, Activation::kRelu, Activation::kSilu,
                                                          Activation::kRelu6};
    static constexpr const char* kForms[] = {"Conv_panels",          "Conv_panels_tail",     "Conv_panels_narrow",
                                             "ConvBf16_panels",      "ConvBf16_panels_tail", "ConvBf16_panels_narrow",
                                             "ConvDepthwise"};
    Operator* next = all;
    for (const char* form : kForms) {
      const bool rounds = std::strncmp(form, "ConvBf16", 8) == 0, depthwise = std::strcmp(form, "ConvDepthwise") == 0;
      for (const Activation activation : kAll) {
        *next = {describe(), "", depthwise, rounds ? Arithmetic::kBf16 : Arithmetic::kFp32, activation};
        const bool none = activation == Activation::kNone;
        std::snprintf(next->name, sizeof next->name, "%s%s%s", form, none ? "" : "_",
                      none ? "" : kActivations[static_cast<size_t>(activation)]);
        ++next;
      }
    }
    static_assert(sizeof kForms / sizeof kForms[0] * kConvActivations == kConvOperators, "an operator for each name");
  }
};

}  // namespace

const CustomOp* conv_operator_at(size_t index) {
  static const Operators operators;
  return &operators.all[index].op;
}

}  // namespace bf16kit

#include "ort/conv_op.h"

#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>

#include "gemm/block.h"
#include "ort/custom_op.h"
#include "ort/matmul_op.h"
#include "ort/node.h"
#include "ort/status.h"

namespace bf16kit {
namespace {

using namespace abi;

constexpr size_t kMost = 3;  // convolutions of a node
constexpr size_t kX = 0;     // inputs
size_t weight_input(size_t i) { return 1 + i; }
size_t bias_input(size_t count, size_t i) { return 1 + count + i; }

struct Operator {
  CustomOp op;  // the first member, because ONNX Runtime passes its address back
  char name[56];
  size_t count;    // of convolutions: one, or the three of a block, the second of which is depthwise
  bool depthwise;  // a single one
  Arithmetic arithmetic;
  Activation activation;
};

const Operator& of(const CustomOp* op) { return *reinterpret_cast<const Operator*>(op); }

struct Layer {
  bool depthwise;
  Weight weight;
  size_t rank;  // 1 for sequences, 2 for images
  Image image;  // without the sizes that depend on x
  int64_t pad_after[2];
  std::unique_ptr<float[]> taps;  // the weight of a depthwise convolution, [kernel, channels]
};

struct Node {
  const Api* api;
  const Path* path;
  const Path* pixels;  // of depthwise convolutions
  const Operator* op;
  Layer layers[kMost];
};

// The name of an attribute: those of a block have the number of the convolution behind it.
struct Name {
  char text[24];

  Name(const char* stem, const char* suffix) { std::snprintf(text, sizeof text, "%s%s", stem, suffix); }
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
Status* read_windows(const Api* api, const KernelInfo* info, const char* suffix, Layer& layer) {
  Image& image = layer.image;
  const size_t rank = layer.rank = count_ints(api, info, Name("kernel_shape", suffix).text);
  if (rank < 1 || rank > 2) {
    return error(api, kInvalidGraph, "attribute kernel_shape has %zu integers; it must have one or two, because only sequences"
                 " and images are supported", rank);
  }
  const size_t first = 2 - rank;
  int64_t pads[4] = {};
  image.kernel[0] = image.stride[0] = image.dilation[0] = 1;
  BF16KIT_RETURN_IF_ERROR(read_ints(api, info, Name("kernel_shape", suffix).text, 1, image.kernel + first, rank));
  BF16KIT_RETURN_IF_ERROR(read_ints(api, info, Name("strides", suffix).text, 1, image.stride + first, rank));
  BF16KIT_RETURN_IF_ERROR(read_ints(api, info, Name("dilations", suffix).text, 1, image.dilation + first, rank));
  BF16KIT_RETURN_IF_ERROR(read_ints(api, info, Name("pads", suffix).text, 0, pads, 2 * rank));
  std::memcpy(image.pad + first, pads, sizeof(int64_t) * rank);
  std::memcpy(layer.pad_after + first, pads + rank, sizeof(int64_t) * rank);
  return nullptr;
}

// Reads how many groups of channels a convolution has. A node that does not say it, as in older artifacts, has one.
Status* read_groups(const Api* api, const KernelInfo* info, const char* name, Layer& layer) {
  const int64_t channels = layer.image.channels, n = layer.weight.n;
  int64_t groups = 1;
  Status* status = call<Status*>(api, kKernelInfoGetAttributeInt64, info, name, &groups);
  if (status != nullptr) call<void>(api, kReleaseStatus, status);
  if (groups < 1 || channels % groups != 0 || n % groups != 0) {
    return error(api, kInvalidGraph, "attribute %s is %lld; it must divide channels = %lld and n = %lld", name,
                 static_cast<long long>(groups), static_cast<long long>(channels), static_cast<long long>(n));
  }
  layer.image.groups = groups;
  return nullptr;
}

Status* read_taps(const Api* api, Layer& layer) {
  const int64_t channels = layer.image.channels, taps = layer.weight.k;
  if (channels != layer.weight.n || channels < kFewestChannels) {
    return error(api, kInvalidGraph, "channels = %lld and n = %lld of a depthwise convolution; they must be equal, and at"
                 " least %lld", static_cast<long long>(channels), static_cast<long long>(layer.weight.n),
                 static_cast<long long>(kFewestChannels));
  }
  layer.taps.reset(new (std::nothrow) float[static_cast<size_t>(taps * channels)]);
  if (layer.taps == nullptr) return error(api, kFail, "out of memory");
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t t = 0; t < taps; ++t) {
      const uint32_t bits = static_cast<uint32_t>(layer.weight.data[c * taps + t]) << 16;
      std::memcpy(&layer.taps[static_cast<size_t>(t * channels + c)], &bits, sizeof bits);
    }
  }
  return nullptr;
}

// Whether each window is one pixel, and each pixel has one.
bool of_pixels(const Layer& layer) {
  for (int i = 0; i < 2; ++i) {
    if (layer.image.kernel[i] != 1 || layer.image.stride[i] != 1 || layer.image.pad[i] + layer.pad_after[i] != 0) return false;
  }
  return true;
}

// Reads convolution `i` of a node.
Status* read_layer(const Api* api, const KernelInfo* info, const char* suffix, size_t i, Layer& layer) {
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, Name("channels", suffix).text, layer.image.channels));
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, Name("n", suffix).text, layer.weight.n));
  BF16KIT_RETURN_IF_ERROR(read_windows(api, info, suffix, layer));
  if (!layer.depthwise) BF16KIT_RETURN_IF_ERROR(read_groups(api, info, Name("group", suffix).text, layer));
  // Each factor is at most INT32_MAX, so no product of two of them overflows.
  const int64_t taps = layer.image.kernel[0] * layer.image.kernel[1];
  layer.weight.k = taps;
  if (!layer.depthwise && __builtin_mul_overflow(taps, layer.image.channels / layer.image.groups, &layer.weight.k)) {
    return error(api, kInvalidGraph, "a window of %lld pixels is too large", static_cast<long long>(taps));
  }
  int64_t elements = 0;
  if (__builtin_mul_overflow(layer.weight.k, layer.weight.n, &elements)) {
    return error(api, kInvalidGraph, "a weight of k = %lld and n = %lld is too large", static_cast<long long>(layer.weight.k),
                 static_cast<long long>(layer.weight.n));
  }
  BF16KIT_RETURN_IF_ERROR(read_weight(api, info, weight_input(i), layer.weight));
  return layer.depthwise ? read_taps(api, layer) : nullptr;
}

Status* create(const CustomOp* op, const Api* api, const KernelInfo* info, void** created) noexcept {
  std::unique_ptr<Node> node(new (std::nothrow) Node{});
  if (node == nullptr) return error(api, kFail, "out of memory");
  node->api = api;
  node->op = &of(op);
  BF16KIT_RETURN_IF_ERROR(read_path(api, node->op->arithmetic, node->path));
  BF16KIT_RETURN_IF_ERROR(read_path(api, Arithmetic::kFp32, node->pixels));
  static constexpr const char* kSuffixes[] = {"", "1", "2", "3"};
  const size_t count = node->op->count;
  for (size_t i = 0; i < count; ++i) {
    Layer& layer = node->layers[i];
    layer.depthwise = count == 1 ? node->op->depthwise : i == 1;
    BF16KIT_RETURN_IF_ERROR(read_layer(api, info, kSuffixes[count == 1 ? 0 : i + 1], i, layer));
    if (count == 1) continue;
    if (!layer.depthwise && (layer.weight.k != layer.image.channels || !of_pixels(layer))) {
      return error(api, kInvalidGraph, "convolution %zu of a block has windows of several pixels, strides or pads", i + 1);
    }
    if (i > 0 && layer.image.channels != node->layers[i - 1].weight.n) {
      return error(api, kInvalidGraph, "convolution %zu of a block has %lld channels; n of the one before is %lld", i + 1,
                   static_cast<long long>(layer.image.channels), static_cast<long long>(node->layers[i - 1].weight.n));
    }
  }
  *created = node.release();
  return nullptr;
}

void destroy(void* created) noexcept { delete static_cast<Node*>(created); }

// Sets the sizes of x and y in `image`, and the dimensions of y in `shape`, which are those of x before.
Status* read_sizes(const Api* api, const Layer& layer, Shape& shape, Image& image) {
  const size_t rank = layer.rank;
  if (shape.count != rank + 2 || shape.dims[rank + 1] != image.channels) {
    return error(api, kInvalidArgument, "x has %zu dimensions, the last of %lld; it must have %zu, the last of %lld channels",
                 shape.count, static_cast<long long>(shape.count == 0 ? 0 : shape.dims[shape.count - 1]), rank + 2,
                 static_cast<long long>(image.channels));
  }
  const int64_t sizes[2] = {rank == 1 ? 1 : shape.dims[1], shape.dims[rank]};
  int64_t out[2];
  for (int i = 0; i < 2; ++i) {
    const int64_t window = (image.kernel[i] - 1) * image.dilation[i] + 1, padded = sizes[i] + image.pad[i] + layer.pad_after[i];
    if (padded < window) {
      return error(api, kInvalidArgument, "x is %lld pixels %s with its padding; a window is %lld",
                   static_cast<long long>(padded), i == 0 ? "high" : "wide", static_cast<long long>(window));
    }
    out[i] = (padded - window) / image.stride[i] + 1;
  }
  image.height = sizes[0], image.width = sizes[1];
  image.out_height = out[0], image.out_width = out[1];
  if (rank == 2) shape.dims[1] = out[0];
  shape.dims[rank] = out[1];
  shape.dims[rank + 1] = layer.weight.n;
  return nullptr;
}

Status* run(void* created, KernelContext* context) noexcept {
  const Node& node = *static_cast<const Node*>(created);
  const Api* api = node.api;
  const size_t count = node.op->count;
  Shape shape;
  const float *x = nullptr, *biases[kMost] = {};
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, kX, shape, &x));
  const int64_t batch = shape.count == 0 ? 0 : shape.dims[0];
  Image images[kMost];
  for (size_t i = 0; i < count; ++i) {
    const Shape wanted = {{node.layers[i].weight.n}, 1};
    BF16KIT_RETURN_IF_ERROR(read_input(api, context, bias_input(count, i), "bias", wanted, &biases[i]));
    images[i] = node.layers[i].image;
    BF16KIT_RETURN_IF_ERROR(read_sizes(api, node.layers[i], shape, images[i]));
  }
  float* y = nullptr;
  BF16KIT_RETURN_IF_ERROR(make_output(api, context, 0, shape, &y));
  Threads threads = {api, context, nullptr};
  const auto product = [&](size_t i, Activation activation, const float* from, float* to) {
    return Product{from, batch * images[i].out_height * images[i].out_width, node.layers[i].weight, biases[i], activation,
                   node.op->arithmetic, to, 0};
  };
  const auto depthwise = [&](size_t i, const float* from, float* to) {
    return Depthwise{from, batch, images[i], node.layers[i].taps.get(), biases[i], node.op->activation, to};
  };
  bool done = true;
  if (count > 1) {
    const Block block = {product(0, node.op->activation, x, nullptr), depthwise(1, nullptr, nullptr),
                         product(2, Activation::kNone, nullptr, y)};
    done = convolve(block, *node.path, *node.pixels, run_parts, &threads);
  } else if (node.op->depthwise) {
    convolve(depthwise(0, x, y), *node.pixels, run_parts, &threads);
  } else {
    Product windows = product(0, node.op->activation, x, y);
    if (!of_pixels(node.layers[0]) || images[0].groups > 1) windows.image = images;
    done = multiply(&windows, 1, *node.path, run_parts, &threads);
  }
  if (threads.status != nullptr) return threads.status;
  return done ? nullptr : error(api, kFail, "out of memory while copying windows of x");
}

CustomOp describe() {
  CustomOp op = custom_op_of_floats<Operator>([](const CustomOp* op) noexcept -> size_t { return 1 + 2 * of(op).count; },
                                              [](const CustomOp*) noexcept -> size_t { return 1; });
  op.GetInputType = [](const CustomOp* op, size_t i) noexcept -> int { return i >= 1 && i <= of(op).count ? kBfloat16 : kFloat; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = run;
  op.KernelDestroy = destroy;
  return op;
}

// The names must be those in converter/fuse/convolve.py.
struct Operators {
  Operator all[kConvOperators];

  Operators() {
    Operator* next = all;
    const auto add = [&](const char* stem, const char* form, const char* last_form, size_t count, Arithmetic arithmetic) {
      for (const Activation activation : {Activation::kNone, Activation::kRelu, Activation::kSilu, Activation::kRelu6}) {
        const bool none = activation == Activation::kNone, depthwise = *form == 0;  // a depthwise weight has no form
        *next = {describe(), "", count, depthwise, arithmetic, activation};
        std::snprintf(next->name, sizeof next->name, "%s%s%s%s%s", stem, form, last_form, none ? "" : "_",
                      none ? "" : kActivations[static_cast<size_t>(activation)]);
        ++next;
      }
    };
    static constexpr const char* kForms[] = {"_panels", "_panels_tail", "_panels_narrow"};
    add("ConvDepthwise", "", "", 1, Arithmetic::kFp32);
    for (const Arithmetic arithmetic : {Arithmetic::kFp32, Arithmetic::kBf16}) {
      const bool rounds = arithmetic == Arithmetic::kBf16;
      for (const char* form : kForms) {
        add(rounds ? "ConvBf16" : "Conv", form, "", 1, arithmetic);
        for (const char* last_form : kForms) add(rounds ? "ConvBlockBf16" : "ConvBlock", form, last_form, kMost, arithmetic);
      }
    }
  }
};

}  // namespace

const CustomOp* conv_operator_at(size_t index) {
  static const Operators operators;
  return &operators.all[index].op;
}

}  // namespace bf16kit

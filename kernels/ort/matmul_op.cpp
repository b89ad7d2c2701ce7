#include "ort/matmul_op.h"

#include <cstdio>
#include <iterator>
#include <new>

#include "ort/node.h"
#include "ort/status.h"

namespace bf16kit {

using namespace abi;

namespace {

struct Node {
  const Api* api;
  const Path* path;
  size_t count;  // the number of weights
  Weight weights[kMostProducts];
  Activation activation;
  Arithmetic arithmetic;
};

constexpr size_t kX = 0;
size_t weight_input(size_t i) { return 1 + i; }
size_t bias_input(const Node& node, size_t i) { return 1 + node.count + i; }

// Checks a constant bias at load, so that a wrong one fails there. A computed bias is checked at run time.
Status* check_constant_bias(const Api* api, const KernelInfo* info, size_t input, int64_t n) {
  int is_constant = 0;
  const Value* bias = nullptr;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kKernelInfoGetConstantInputTensor, info, input, &is_constant, &bias));
  if (is_constant == 0 || bias == nullptr) return nullptr;
  Shape shape;
  BF16KIT_RETURN_IF_ERROR(read_shape(api, bias, shape));
  return check_shape(api, "bias", shape, {{n}, 1});
}

Status* read_how(const Api* api, const KernelInfo* info, Weight& weight, Activation& activation) {
  static constexpr const char* kLayouts[] = {"panels", "transposed"};
  size_t choice = 0;
  BF16KIT_RETURN_IF_ERROR(read_choice(api, info, "layout", kLayouts, std::size(kLayouts), choice));
  weight.layout = choice == 0 ? Layout::kPanels : Layout::kTransposed;
  BF16KIT_RETURN_IF_ERROR(read_choice(api, info, "activation", kActivations, std::size(kActivations), choice));
  activation = static_cast<Activation>(choice);  // declared in the same order
  return nullptr;
}

}  // namespace

Status* create_product(const Api* api, const KernelInfo* info, size_t weights, Arithmetic arithmetic, void** created) noexcept {
  Node node = {};
  node.api = api;
  node.arithmetic = arithmetic;
  node.count = weights;
  BF16KIT_RETURN_IF_ERROR(read_path(api, arithmetic, node.path));
  int64_t k = 0;
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, "k", k));
  if (weights == 1) BF16KIT_RETURN_IF_ERROR(read_how(api, info, node.weights[0], node.activation));
  for (size_t i = 0; i < weights; ++i) {
    char name[3] = {'n', static_cast<char>(weights == 1 ? 0 : '1' + i), 0};
    node.weights[i].k = k;
    BF16KIT_RETURN_IF_ERROR(read_size(api, info, name, node.weights[i].n));
    BF16KIT_RETURN_IF_ERROR(read_weight(api, info, weight_input(i), node.weights[i]));
    BF16KIT_RETURN_IF_ERROR(check_constant_bias(api, info, bias_input(node, i), node.weights[i].n));
  }
  *created = new (std::nothrow) Node(node);
  return *created != nullptr ? nullptr : error(api, kFail, "out of memory");
}

void destroy_product(void* created) noexcept { delete static_cast<Node*>(created); }

Status* run_product(void* created, KernelContext* context) noexcept {
  const Node& node = *static_cast<const Node*>(created);
  const Api* api = node.api;
  const int64_t k = node.weights[0].k;
  Shape shape;
  const float* x = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, kX, shape, &x));
  if (shape.count == 0) return error(api, kInvalidArgument, "x is a scalar; it must have at least one dimension");
  const size_t last = shape.count - 1;
  if (shape.dims[last] != k) {
    return error(api, kInvalidArgument, "the last dimension of x is %lld; the weight has k = %lld rows",
                 static_cast<long long>(shape.dims[last]), static_cast<long long>(k));
  }
  const int64_t rows = shape.elements(0, last);
  Product products[kMostProducts] = {};
  for (size_t i = 0; i < node.count; ++i) {
    products[i] = {x, rows, node.weights[i], nullptr, node.activation, node.arithmetic, nullptr, 0};
    const Shape wanted = {{node.weights[i].n}, 1};
    BF16KIT_RETURN_IF_ERROR(read_input(api, context, bias_input(node, i), "bias", wanted, &products[i].bias, kOptional));
    shape.dims[last] = node.weights[i].n;
    BF16KIT_RETURN_IF_ERROR(make_output(api, context, i, shape, &products[i].y));
  }
  Threads threads = {api, context, nullptr};
  const bool done = multiply(products, node.count, *node.path, run_parts, &threads);
  if (threads.status != nullptr) return threads.status;
  return done ? nullptr : error(api, kFail, "out of memory while copying %lld rows of x", static_cast<long long>(rows));
}

}  // namespace bf16kit

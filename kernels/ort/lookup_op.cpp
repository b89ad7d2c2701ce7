#include "ort/lookup_op.h"

#include <cstring>
#include <new>

#include "ort/node.h"
#include "ort/status.h"

namespace bf16kit {

using namespace abi;

namespace {

struct Node {
  const Api* api;
  Weight table;
};

// The elements of a part: about as many as one thread looks up before another one has woken up.
constexpr int64_t kPart = 16384;

struct Lookup {
  const Weight& table;
  const int64_t* indices;
  int64_t count;
  int64_t each;  // the rows of a part
  float* rows;
};

// Looks up row i. Its elements are in one column of a panel: each is in a cache line of its own, in successive lines.
void look_up(const Lookup& lookup, int64_t i) {
  const Weight& table = lookup.table;
  const int64_t index = lookup.indices[i] < 0 ? lookup.indices[i] + table.n : lookup.indices[i];
  const int64_t panel = index / kPanel, width = table.width(panel);
  const uint16_t* from = table.data + panel * kPanel * table.k + index % kPanel;
  float* to = lookup.rows + i * table.k;
  for (int64_t k = 0; k < table.k; ++k) {
    const uint32_t bits = static_cast<uint32_t>(from[k * width]) << 16;
    std::memcpy(to + k, &bits, sizeof bits);
  }
}

void look_up_part(void* context, size_t part) {
  const Lookup& lookup = *static_cast<const Lookup*>(context);
  const int64_t first = static_cast<int64_t>(part) * lookup.each;
  for (int64_t i = first; i < first + lookup.each && i < lookup.count; ++i) look_up(lookup, i);
}

}  // namespace

Status* create_lookup(const Api* api, const KernelInfo* info, void** created) noexcept {
  Node node = {};
  node.api = api;
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, "k", node.table.k));
  BF16KIT_RETURN_IF_ERROR(read_size(api, info, "n", node.table.n));
  BF16KIT_RETURN_IF_ERROR(read_weight(api, info, 1, node.table));
  *created = new (std::nothrow) Node(node);
  return *created != nullptr ? nullptr : error(api, kFail, "out of memory");
}

void destroy_lookup(void* created) noexcept { delete static_cast<Node*>(created); }

Status* run_lookup(void* created, KernelContext* context) noexcept {
  const Node& node = *static_cast<const Node*>(created);
  const Api* api = node.api;
  Shape shape;
  const float* data = nullptr;
  BF16KIT_RETURN_IF_ERROR(read_input(api, context, 0, shape, &data));
  const auto* indices = reinterpret_cast<const int64_t*>(data);
  const int64_t count = shape.elements(0, shape.count), n = node.table.n;
  for (int64_t i = 0; i < count; ++i) {
    if (indices[i] < -n || indices[i] >= n) {
      return error(api, kInvalidArgument, "index %lld, number %lld of them, is outside of a table of %lld rows",
                   static_cast<long long>(indices[i]), static_cast<long long>(i), static_cast<long long>(n));
    }
  }
  shape.dims[shape.count++] = node.table.k;
  Lookup lookup = {node.table, indices, count, kPart / node.table.k + 1, nullptr};
  BF16KIT_RETURN_IF_ERROR(make_output(api, context, 0, shape, &lookup.rows));
  if (count == 0) return nullptr;
  Threads threads = {api, context, nullptr};
  const auto parts = static_cast<size_t>((count + lookup.each - 1) / lookup.each);
  if (parts == 1) {
    look_up_part(&lookup, 0);
  } else {
    run_parts(&threads, look_up_part, parts, &lookup);
  }
  return threads.status;
}

}  // namespace bf16kit

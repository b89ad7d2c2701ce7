// Attention: y = softmax(scale * q · kᵀ + mask) · v for each head, without a matrix of all scores.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm/parts.h"

namespace bf16kit {

struct Path;
enum class Arithmetic;

// A tensor of four dimensions in memory, with its strides in elements. A stride of 0 repeats one element.
struct Strided {
  const float* data;
  int64_t batch, head, row, column;
};

// The operands of one attention. heads / kv_heads neighbouring heads of q share one head of k and v.
struct Attention {
  int64_t batch, heads, kv_heads;
  int64_t queries, keys;  // rows of q, and of k and v
  int64_t depth, width;   // columns of q and k, and of v
  float scale;
  Arithmetic arithmetic;
  Strided q, k, v;  // their columns are contiguous
  Strided mask;     // [batch, heads, queries, keys], added to the scaled scores; its data may be null
  float* y;         // [batch, queries, heads * width]
  uint64_t id;      // identifies these keys and values: a thread reuses its copies of them in the next part

  int64_t shared() const { return heads / kv_heads; }
  int64_t rows() const { return shared() * queries; }  // the rows of q that read the same keys
};

// The part of an attention that one thread computes: some of the rows of q that read the keys of one head. These rows are
// ordered by head, then by query.
struct AttentionPart {
  int64_t batch, kv_head;
  int64_t first_row, rows;
};

// Computes y with `run(threads, …)` and sets `id`. Returns false if there was no memory.
bool attend(Attention& attention, const Path& path, RunParts run, void* threads);

}  // namespace bf16kit

// A bf16 weight, its layout in memory, and the sizes of the blocks that the tiles read.
#pragma once

#include <cstdint>

namespace bf16kit {

constexpr int64_t kPanel = 32;   // columns of a panel: one cache line of bf16
constexpr int64_t kChain = 128;  // rows of a weight summed in one chain of fused multiply-adds; see tile.inl

enum class Activation { kNone, kRelu, kGelu, kGeluTanh, kSilu, kRelu6 };

// How a weight [k, n] is stored.
enum class Layout {
  // Panels of 32 columns, one after the other, each [k, 32] in C order; the last may be narrower. The converter's default:
  // a product of few rows reads the weight from front to back.
  kPanels,
  // [n, k] in C order: for weights that other operators read as well, and for 1x1 convolutions.
  kTransposed,
};

struct Weight {
  const uint16_t* data;
  int64_t k;
  int64_t n;
  Layout layout;

  int64_t panels() const { return (n + kPanel - 1) / kPanel; }
  // The number of columns of a panel: fewer than kPanel in a narrower last one.
  int64_t width(int64_t panel) const { return panel + 1 < panels() || n % kPanel == 0 ? kPanel : n % kPanel; }
};

}  // namespace bf16kit

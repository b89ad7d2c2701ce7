// The self-check of a path whose instructions may not do what their manual says.
#pragma once

#include "gemm/path.h"

namespace bf16kit {

enum class Operands {
  kExact,     // every sum is exact in any order, so all paths agree: what the accumulation probe asserts
  kOrdinary,  // about 1, of both signs
  kWide,      // of exponents from -67 to 65: some products are zero, and some sums overflow
  kTiny,      // positive, products about the smallest normal number: results that are not flushed to zero become visible
  kSpecial,   // ordinary, among them infinities, NaN, zeros of both signs and subnormals
};
constexpr Operands kAllOperands[] = {Operands::kExact, Operands::kOrdinary, Operands::kWide, Operands::kTiny, Operands::kSpecial};

// Returns whether a small product in bf16 has the same bits if `together` computes all of its rows at once and `alone` one to
// three rows at a time, as if each were another request. All NaN count as the same: only their payloads may differ.
bool agree(const Path& together, const Path& alone, Operands operands);

}  // namespace bf16kit

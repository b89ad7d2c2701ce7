// Tests the AMX path without a processor that has AMX. A model of the published instructions computes its products, which are
// compared with float64 and with the order of sums that isa/amx.inl states. Also tests the detection of AMX.
//
//   amx_test [--cases 10000] [--seed 1] [--only INDEX]
#include <functional>

#include "checks.h"
#include "isa/amx_detect.h"

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw")
#endif

namespace bf16kit {
namespace amx_model {
namespace {

#include "isa/avx512.inl"

#include "isa/activation.inl"
#include "isa/operands.inl"

#include "amx_model.h"

#include "isa/amx.inl"

TileConfig Tile::current() {
  TileConfig config;
  std::memcpy(&config, tile_state().config, sizeof config);
  return config;
}

void Tile::configure(const TileConfig& config) {
  std::memcpy(tile_state().config, &config, sizeof config);
  std::memset(tile_state().values, 0, sizeof tile_state().values);
}

// Returns a sum before bias and activation in the order that amx.inl states, with the first `parts` parts of each x.
float sum_in_tiles(const Case& c, int64_t row, int64_t column, int parts) {
  float total = 0;
  for (int64_t first = 0; first < c.k; first += kChain) {
    float sum = 0;
    for (int64_t step = first; step < std::min(c.k, first + kChain); step += kTileDepth) {
      for (int part = parts - 1; part >= 0; --part) {
        float chains[2] = {0, 0};
        for (int64_t i = step; i < std::min({c.k, first + kChain, step + kTileDepth}); ++i) {
          uint16_t each[kSplit];
          split(c.x[row * c.k + i], each);
          const float w = widened(c.w[i * c.n + column]);
          chains[(i - step) % 2] = tile_fma(widened(each[part]), w, chains[(i - step) % 2]);
        }
        sum = tile_add(sum, tile_add(chains[0], chains[1]));
      }
    }
    total += sum;
  }
  return total;
}

}  // namespace
}  // namespace amx_model

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace {

using namespace amx_model;

const Path kModel = {.name = "amx (model)", .supported = [] { return true; }, .fp32 = compute_in_tiles};

// fp32's error bound for the number of additions that one product passes through here, plus the loss from subnormals: one
// smallest normal number for each operation, and for each operand one times the other operand.
void widen_tolerance(const Case& c, Expected& expected) {
  const double own = std::min<int64_t>(c.k, 16) + 1 + 3.0 * std::min<int64_t>((c.k + 31) / 32, 4) + (c.k + 127) / 128;
  const double usual = std::min<int64_t>(c.k, 128) + (c.k + 127) / 128;
  for (int64_t i = 0; i < c.rows * c.n; ++i) {
    double lost = 0;
    for (int64_t k = 0; k < c.k; ++k) {
      const double x = c.x[i / c.n * c.k + k], w = widened(c.w[k * c.n + i % c.n]);
      lost += 4 + (std::isfinite(x) ? std::fabs(x) : 0) + (std::isfinite(w) ? 3 * std::fabs(w) : 0);
    }
    expected.tolerance[i] = expected.tolerance[i] * std::max(1.0, own / usual) + 1.13 * lost * 0x1p-126;
  }
}

// Draws cases as for the other paths, but smaller, and without the values for which amx.inl says that the path differs.
Case draw_small(Random& random) {
  constexpr int64_t kMost = 60000;  // multiplications
  Case c = draw(random);
  while (c.rows * c.k * c.n > kMost) c = draw(random);
  c.arithmetic = Arithmetic::kFp32;
  const bool all_finite = std::all_of(c.x.data(), c.x.data() + c.x.size(), [](float x) { return std::isfinite(x); });
  for (uint16_t& w : c.w) {
    if ((w & 0x7fff) == 0x7f80) w = 0x3f80;
    if ((w & 0x7f80) == 0 && !all_finite) w = 0;
  }
  store_weight(c, random.between(0, 31));
  return c;
}

void check_product(const Case& c, Random& random, const std::string& name) {
  const std::string where = name + " path=amx (model) " + c.describe();
  Expected expected = expect(c);
  widen_tolerance(c, expected);
  const Exact<float> whole = compute(c, kModel, 0, c.rows);
  check_close(whole, expected, c.n, where);
  check_same(whole, compute_in_parts(c, kModel, random), 0, c.n, where, "in other parts");
  check_same(whole, compute_on_threads(c, kModel, 2, 1)[0], 0, c.n, where, "through multiply()");
  const int64_t row = random.between(0, c.rows - 1), index = row * c.n + random.between(0, c.n - 1);
  check_same(whole, compute(c, kModel, row, 1), row, c.n, where, "alone");
  if (c.activation != Activation::kNone) return;
  float wanted = sum_in_tiles(c, row, index % c.n, kSplit);
  if (c.bias.size() != 0) wanted += c.bias[index % c.n];
  if (!same(whole[index], wanted)) {
    fail(where, number(whole[index]) + " is not " + number(wanted) + ", the sum in order," + at(index, c.n));
  }
}

// Floats with random bits: the parts add up to the float, up to the smallest normal number; infinities and NaN stay as they are.
void check_split(Random& random) {
  for (int i = 0; i < 200000; ++i) {
    const auto bits = static_cast<uint32_t>(random.between(0, UINT32_MAX));
    float x;
    std::memcpy(&x, &bits, sizeof x);
    uint16_t parts[kSplit];
    split(x, parts);
    const float sum = widened(parts[2]) + widened(parts[1]) + widened(parts[0]);
    const bool below = std::fabs(x) < 0x1p-100f && std::fabs(sum - x) < 0x1p-126f;
    if (!same(sum, x) && !below) return fail("split", number(x) + " becomes " + number(sum));
  }
}

// The largest error of sums of 2048 ordinary products, in units of 2^-24 sum |x||w|, for each number of parts of x and for
// tile.inl's order. Three parts are as exact as fp32; two are not.
void check_class_of_error(Random& random) {
  Case c;
  c.rows = 64, c.k = 2048, c.n = 1;
  c.x = Exact<float>(c.rows * c.k, 0);
  for (int64_t i = 0; i < c.x.size(); ++i) c.x[i] = std::fabs(random.normal());
  c.w.resize(c.k);
  for (uint16_t& w : c.w) w = narrow(std::fabs(random.normal()));
  double worst[4] = {};
  for (int64_t row = 0; row < c.rows; ++row) {
    double exact = 0;
    for (int64_t k = 0; k < c.k; ++k) exact += static_cast<double>(c.x[row * c.k + k]) * widened(c.w[k]);
    const auto note = [&](int which, double sum) {
      worst[which] = std::max(worst[which], std::fabs(sum - exact) / exact * 0x1p24);
    };
    note(0, sum_in_order(c, row, 0));
    for (int parts = 1; parts <= kSplit; ++parts) note(parts, sum_in_tiles(c, row, 0, parts));
  }
  std::printf("amx: largest error in units of 2^-24 sum |x||w|: fp32 chains %.2f, tiles with x in 1, 2, 3 parts"
              " %.0f, %.1f, %.2f\n", worst[0], worst[1], worst[2], worst[3]);
  if (worst[3] > 2 * worst[0] || worst[2] < 4 * worst[0] || worst[1] < 16 * worst[2]) fail("parts of x", "another order");
}

// The cases in which the AMX path differs, as amx.inl says: an infinite weight; and the state of a thread's tiles afterwards.
void check_particulars_of_tiles() {
  Case c;
  c.rows = 2, c.k = 1, c.n = 1;
  c.x = Exact<float>(2, 0);
  c.x[0] = 1, c.x[1] = 1 + 0x1p-10f + 0x1p-20f;
  c.w = {0x7f80};
  store_weight(c, 0);
  const Exact<float> y = compute(c, kModel, 0, 2);
  if (!std::isnan(y[0]) || !std::isinf(y[1])) fail("an infinite weight", "amx.inl says something else");
  TileConfig others;
  others.rows[3] = 5, others.bytes[3] = 12;
  Tile::configure(others);
  compute(c, kModel, 0, 2);
  const TileConfig after = Tile::current();
  if (std::memcmp(&after, &others, sizeof after) != 0) fail("tiles", "they are not set up as they were");
  Tile::configure(TileConfig());
}

// --- detection of AMX -----------------------------------------------------------------------------------------------

struct Fake {
  amx::Registers leaf1, leaf7, palette;
  uint32_t last_leaf;
  uint64_t enabled;
  bool permitted;
  int asked;
};
Fake g_fake;

bool offered(const std::function<void(Fake&)>& change) {
  g_fake = {{0, 0, 1u << 27, 0}, {0, 1u << 16 | 1u << 30, 0, 1u << 22 | 1u << 24}, {0, 8u << 16 | 64, 16, 0},
            0x20, 0x600e7, true, 0};
  change(g_fake);
  static const amx::Machine machine = {
      [](uint32_t leaf, uint32_t subleaf) -> amx::Registers {
        if (leaf == 0) return {g_fake.last_leaf, 0, 0, 0};
        if (leaf == 1) return g_fake.leaf1;
        if (leaf == 7) return g_fake.leaf7;
        return leaf == 0x1d && subleaf == 1 ? g_fake.palette : amx::Registers{};
      },
      [] { return g_fake.enabled; },
      [] { ++g_fake.asked; return g_fake.permitted; }};
  return amx::tiles_offered(machine);
}

void check_offer() {
  if (!offered([](Fake&) {}) || g_fake.asked != 1) fail("offer", "not where everything is there");
  const std::vector<std::pair<const char*, std::function<void(Fake&)>>> missing = {
      {"leaf 0x1d", [](Fake& f) { f.last_leaf = 0x1c; }},
      {"OSXSAVE", [](Fake& f) { f.leaf1.c = 0; }},
      {"AVX-512F", [](Fake& f) { f.leaf7.b &= ~(1u << 16); }},
      {"AVX-512BW", [](Fake& f) { f.leaf7.b &= ~(1u << 30); }},
      {"AMX-BF16", [](Fake& f) { f.leaf7.d &= ~(1u << 22); }},
      {"AMX-TILE", [](Fake& f) { f.leaf7.d &= ~(1u << 24); }},
      {"eight tiles", [](Fake& f) { f.palette.b = 4u << 16 | 64; }},
      {"rows of 64 bytes", [](Fake& f) { f.palette.b = 8u << 16 | 32; }},
      {"16 rows", [](Fake& f) { f.palette.c = 8; }},
      {"saved tile configuration", [](Fake& f) { f.enabled &= ~(uint64_t{1} << 17); }},
      {"saved tiles", [](Fake& f) { f.enabled &= ~(uint64_t{1} << 18); }},
      {"saved AVX-512", [](Fake& f) { f.enabled &= ~(uint64_t{1} << 6); }},
  };
  for (const auto& [what, change] : missing) {
    if (offered(change)) fail("offer", std::string("without ") + what);
    if (g_fake.asked != 0) fail("offer", std::string("the system was asked, without ") + what);
  }
  if (offered([](Fake& f) { f.permitted = false; })) fail("offer", "without the system's permission");
}

// AMX is off by default. For products in bf16, the path is the one that would be used without AMX.
void check_choice_of_tiles() {
  for (const Arithmetic arithmetic : {Arithmetic::kFp32, Arithmetic::kBf16}) {
    unsetenv("BF16KIT_KERNEL_PATH");
    const Path* usual = choose_path(arithmetic);
    if (usual == &kAmx) fail("choose_path", "amx without being asked for");
    setenv("BF16KIT_KERNEL_PATH", kAmx.name, 1);
    const Path* wanted = !kAmx.supported() ? nullptr : arithmetic == Arithmetic::kFp32 ? &kAmx : usual;
    if (choose_path(arithmetic) != wanted) fail("choose_path", "not what goes with amx");
    unsetenv("BF16KIT_KERNEL_PATH");
  }
}

int run(int64_t cases, int64_t only) {
  check_offer();
  if (!kAvx512.supported() || __builtin_cpu_supports("avx512bw") == 0) {
    std::printf("amx: left out but for its detection: the model's activations need AVX-512\n");
    return g_failures == 0 ? 0 : 1;
  }
  Random random(g_seed, 0);
  if (only < 0) {
    check_choice_of_tiles();
    check_split(random);
    check_class_of_error(random);
    check_particulars_of_tiles();
  }
  return run_cases(cases, only, " of tiles", "", [](int64_t i) {
    Random own(g_seed, i);
    const Case c = draw_small(own);
    check_product(c, own, "--only " + std::to_string(i));
  });
}

}  // namespace
}  // namespace bf16kit
#endif

int main([[maybe_unused]] int count, [[maybe_unused]] char** arguments) {
#if defined(__x86_64__)
  return bf16kit::run_as_told(count, arguments, bf16kit::run);
#endif
}

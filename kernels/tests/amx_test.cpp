// Tests the AMX path without a processor that has AMX. A model of the published instructions computes its products, which are
// compared with float64 and with the order of sums that isa/amx.inl states. Few rows run as they do on a processor. Also tests the
// self-check and the detection of AMX.
//
//   amx_test [--cases 10000] [--seed 1] [--only INDEX]
#include <chrono>
#include <functional>

#include "checks.h"
#include "gemm/agree.h"
#include "isa/amx_detect.h"
#include "windows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512bf16"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512bf16")
#endif

namespace bf16kit {
namespace amx_model {
namespace {

#include "isa/avx512.inl"

#include "isa/activation.inl"

namespace dots {
#include "isa/tile.inl"
#include "isa/dots.inl"
}

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

void Tile::release() { configure({0}); }

// Returns a sum before bias and activation in the order that amx.inl states.
float sum_in_tiles(const Case& c, int64_t row, int64_t column) {
  float total = 0;
  for (int64_t first = 0; first < c.k; first += kChain) {
    float sum = 0;
    for (int64_t step = first; step < std::min(c.k, first + kChain); step += kTileDepth) {
      float chains[2] = {0, 0};
      for (int64_t i = step; i < step + kTileDepth; ++i) {
        const bool exists = i < std::min(c.k, first + kChain);
        const float x = exists ? taken(c.x[row * c.k + i], Arithmetic::kBf16) : 0;
        const float w = exists ? static_cast<float>(bf16kit::widen(c.w[i * c.n + column])) : 0;
        chains[i % 2] = tile_fma(x, w, chains[i % 2]);
      }
      sum = tile_add(sum, tile_add(chains[0], chains[1]));
    }
    total = tile_add(total, sum);
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

const Path kModel = {.name = "amx (model)", .tall = false, .supported = [] { return true; }, .bf16 = compute_in_tiles};

// The error bound for the number of additions that one product passes through here, which is larger than tile.inl's for few k.
void widen_tolerance(const Case& c, Expected& expected) {
  const int64_t steps = (c.k + kTileDepth - 1) / kTileDepth, chains = (c.k + kChain - 1) / kChain;
  const double own = std::min<int64_t>(c.k, kTileDepth / 2) + 1 + std::min<int64_t>(steps, kChain / kTileDepth) + chains;
  const double usual = std::min<int64_t>(c.k, kChain) + chains;
  for (double& tolerance : expected.tolerance) tolerance = tolerance * std::max(1.0, own / usual) + 2.5 * steps * 0x1p-126;
}

// Draws cases as for the other paths, but smaller.
bool small(const Case& c) { return c.rows * c.k * c.n <= 60000; }  // multiplications

Case draw_small(Random& random) {
  Case c = draw(random);
  while (!small(c)) c = draw(random);
  c.arithmetic = Arithmetic::kBf16;
  return c;
}

Convolution draw_small_convolution(Random& random) {
  Convolution made = draw_convolution(random);
  while (!small(made.windows)) made = draw_convolution(random);
  made.windows.arithmetic = Arithmetic::kBf16;
  return made;
}

void check_product(const Case& c, Random& random, const std::string& name) {
  const std::string where = name + " path=amx (model) " + c.describe();
  Expected expected = expect(c);
  widen_tolerance(c, expected);
  const Exact<float> whole = compute(c, kModel, 0, c.rows);
  digest(whole);
  check_close(whole, expected, c.n, where);
  check_same(whole, compute_in_parts(c, kModel, random), 0, c.n, where, "in other parts");
  check_same(whole, compute_on_threads(c, kModel, 2, 1)[0], 0, c.n, where, "through multiply()");
  const int64_t row = random.between(0, c.rows - 1), index = row * c.n + random.between(0, c.n - 1);
  check_same(whole, compute(c, kModel, row, 1), row, c.n, where, "alone");
  if (c.activation != Activation::kNone) return;
  float wanted = sum_in_tiles(c, row, index % c.n);
  if (c.bias.size() != 0) wanted = tile_add(wanted, c.bias[index % c.n]);
  if (!same(whole[index], wanted)) {
    fail(where, number(whole[index]) + " is not " + number(wanted) + ", the sum in order," + at(index, c.n));
  }
}

// Windows that are gathered for the tiles give what they give as the rows of a product.
void check_convolution(const Convolution& made, const std::string& name) {
  const Case& c = made.windows;
  int64_t threads = 2;
  Exact<float> y(c.rows * c.n, 1);
  Product product = c.product(y.data());
  product.x = made.x.data(), product.image = &made.image;
  multiply(&product, 1, kModel, run_on_threads, &threads);
  const std::string where = name + " path=amx (model) " + describe(made.image, made.batch) + c.describe();
  check_same(compute(c, kModel, 0, c.rows), y, 0, c.n, where, "as a convolution");
}

// The self-check accepts the model, and the other path where every order gives the same sums; it refuses a model that is wrong in
// one place, with each kind of operands that can show it.
void check_self_check() {
  if (kAmx.tall) fail("parts", "more rows than tiles are configured for");
  if (!agree(kModel, kAvx512Bf16, Operands::kExact)) fail("self-check", "exact sums differ from avx512_bf16's");
  if (agree(kModel, kAvx512Bf16, Operands::kOrdinary)) fail("self-check", "the order of sums makes no difference");
  for (const Operands operands : kAllOperands) {
    const bool tiny = operands == Operands::kTiny, exact = operands == Operands::kExact;
    const std::string where = "self-check, operands " + std::to_string(static_cast<int>(operands));
    for (const Fault fault : {Fault::kNone, Fault::kOneChain, Fault::kSubnormals, Fault::kOnePlace}) {
      tile_state().fault = fault;
      const bool hidden = fault == Fault::kNone || (fault == Fault::kOneChain && exact) || (fault == Fault::kSubnormals && !tiny);
      if (agree(kModel, kModel, operands) != hidden) fail(where, "fault " + std::to_string(static_cast<int>(fault)));
    }
  }
  tile_state().fault = Fault::kNone;
  const auto start = std::chrono::steady_clock::now();
  for (const Operands operands : kAllOperands) agree(kAvx512Bf16, kAvx512Bf16, operands);
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  std::printf("amx: the self-check takes %.2f ms with dot products in place of tiles\n", took.count());
}

// What amx.inl says about a thread's tiles after a product: as before, or released.
void check_tiles_afterwards() {
  Case c;
  c.rows = 5, c.k = 1, c.n = 1, c.arithmetic = Arithmetic::kBf16;
  c.x = Exact<float>(5, 0);
  for (int64_t i = 0; i < 5; ++i) c.x[i] = 1;
  c.w = {0x3f80};
  store_weight(c, 0);
  TileConfig others;
  others.rows[3] = 5, others.bytes[3] = 12;
  Tile::configure(others);
  compute(c, kModel, 0, 5);
  const TileConfig after = Tile::current();
  if (std::memcmp(&after, &others, sizeof after) != 0) fail("tiles", "they are not set up as they were");
  Tile::release();
  compute(c, kModel, 0, 5);
  if (Tile::current().palette != 0) fail("tiles", "they are not released");
}

// --- detection of AMX -----------------------------------------------------------------------------------------------

struct Fake {
  amx::Registers leaf1, leaf7, leaf7_1, palette;
  uint32_t last_leaf;
  uint64_t enabled;
};
Fake g_fake;

bool there(const std::function<void(Fake&)>& change) {
  g_fake = {{0, 0, 1u << 27, 0}, {0, 1u << 16 | 1u << 30, 0, 1u << 22 | 1u << 24}, {1u << 5, 0, 0, 0},
            {0, 8u << 16 | 64, 16, 0}, 0x20, 0x600e7};
  change(g_fake);
  static const amx::Machine machine = {
      [](uint32_t leaf, uint32_t subleaf) -> amx::Registers {
        if (leaf == 0) return {g_fake.last_leaf, 0, 0, 0};
        if (leaf == 1) return g_fake.leaf1;
        if (leaf == 7) return subleaf == 0 ? g_fake.leaf7 : g_fake.leaf7_1;
        return leaf == 0x1d && subleaf == 1 ? g_fake.palette : amx::Registers{};
      },
      [] { return g_fake.enabled; }, [] { return true; }};
  return amx::tiles_there(machine);
}

void check_detection() {
  if (!there([](Fake&) {})) fail("detection", "not where everything is there");
  const std::vector<std::pair<const char*, std::function<void(Fake&)>>> missing = {
      {"leaf 0x1d", [](Fake& f) { f.last_leaf = 0x1c; }},
      {"OSXSAVE", [](Fake& f) { f.leaf1.c = 0; }},
      {"AVX-512F", [](Fake& f) { f.leaf7.b &= ~(1u << 16); }},
      {"AVX-512BW", [](Fake& f) { f.leaf7.b &= ~(1u << 30); }},
      {"AVX512_BF16", [](Fake& f) { f.leaf7_1.a = 0; }},
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
    if (there(change)) fail("detection", std::string("without ") + what);
  }
}

// Tiles are the first choice for bf16. For fp32 the path is the one that would be used without them.
void check_choice_of_tiles() {
  unsetenv("BF16KIT_KERNEL_PATH");
  const Path* fp32 = choose_path(Arithmetic::kFp32);
  if ((choose_path(Arithmetic::kBf16) == &kAmx) != kAmx.supported()) fail("choose_path", "tiles are not the first choice");
  if (kAmx.attend_bf16 != kAvx512Bf16.attend_bf16) fail("choose_path", "tiles change more than products");
  setenv("BF16KIT_KERNEL_PATH", kAmx.name, 1);
  if (choose_path(Arithmetic::kBf16) != (kAmx.supported() ? &kAmx : nullptr)) fail("choose_path", "not amx, by its name");
  if (choose_path(Arithmetic::kFp32) != (kAmx.supported() ? fp32 : nullptr)) fail("choose_path", "not what goes with amx");
  unsetenv("BF16KIT_KERNEL_PATH");
}

int run(int64_t cases, int64_t only) {
  check_detection();
  if (!kAvx512Bf16.supported()) {
    std::printf("amx: left out but for its detection: few rows need AVX512_BF16\n");
    return g_failures == 0 ? 0 : 1;
  }
  if (only < 0) {
    check_choice_of_tiles();
    check_self_check();
    check_tiles_afterwards();
  }
  return run_cases(cases, only, " of tiles", "", [](int64_t i) {
    Random own(g_seed, i);
    const std::string name = "--only " + std::to_string(i);
    const Case c = draw_small(own);
    check_product(c, own, name);
    if (i % 3 == 0) check_convolution(draw_small_convolution(own), name);
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

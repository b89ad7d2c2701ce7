// host draw|check COUNT SEED FILE [PRODUCTS]: writes COUNT random cases for payload.cpp to FILE, or compares its output in FILE
// with the model of the tiles, bit for bit. PRODUCTS: more cases, from minilm.py.
//
// The cases are those of amx_test; every fourth is a convolution, every tenth has results about the smallest normal number. A model
// that is wrong in one place must differ from the output: otherwise the comparison would show nothing.
#define main amx_test_main
#include "amx_test.cpp"
#undef main

#include <fstream>

#include "cases.h"

namespace bf16kit {
namespace {

struct Emulated {
  Case made;
  int64_t part;
  Image image = {};  // of a convolution, and its x
  Exact<float> x = {};
};

std::vector<Emulated> make_cases(int64_t count, const char* products) {
  std::vector<Emulated> cases;
  for (int64_t i = 0; i < count; ++i) {
    Random random(g_seed, i);
    Convolution convolution;
    if (i % 4 == 1) convolution = draw_small_convolution(random);
    else convolution.windows = draw_small(random);
    Case& c = convolution.windows;
    if (i % 10 == 0) {  // all positive: in Bochs a difference below 2^-125, not 2^-126, is 0
      for (int64_t j = 0; j < c.x.size(); ++j) c.x[j] = std::fabs(random.normal()) * 0x1p-63f;
      for (uint16_t& w : c.w) w = narrow(std::fabs(random.normal()) * 0x1p-64f);
      c.bias = Exact<float>();
      store_weight(c, 0);
    }
    cases.push_back({std::move(c), random.between(1, kRowBlock), convolution.image, std::move(convolution.x)});
  }
  std::ifstream file(products, std::ios::binary);
  const auto read = [&](void* to, int64_t size) { return static_cast<bool>(file.read(static_cast<char*>(to), size)); };
  for (int64_t shape[3]; read(shape, sizeof shape);) {
    Case c;
    c.rows = shape[0], c.k = shape[1], c.n = shape[2], c.arithmetic = Arithmetic::kBf16;
    c.x = Exact<float>(c.rows * c.k, 0);
    c.w.resize(c.k * c.n);
    if (!read(c.x.data(), c.rows * c.k * 4) || !read(c.w.data(), c.k * c.n * 2)) fail(products, "it is cut off");
    store_weight(c, 0);
    cases.push_back({std::move(c), kRowBlock});
  }
  return cases;
}

void write_cases(const std::vector<Emulated>& cases, std::ofstream file) {
  const auto count = static_cast<int64_t>(cases.size());
  std::vector<Head> heads;
  std::string data;
  const auto add = [&](const void* from, int64_t size) -> int64_t {
    if (size == 0) return 0;
    data.resize((data.size() + 63) / 64 * 64);
    data.append(static_cast<const char*>(from), size);
    return sizeof count + sizeof(Head) * count + data.size() - size;
  };
  for (const auto& [c, part, image, x] : cases) {
    const Exact<float>& from = image.channels == 0 ? c.x : x;
    heads.push_back({c.rows, c.k, c.n, static_cast<int64_t>(c.layout), static_cast<int64_t>(c.activation), part,
                     add(from.data(), from.size() * 4), add(c.stored.data(), c.stored.size() * 2), add(c.bias.data(), c.bias.size() * 4),
                     image});
  }
  file.write(reinterpret_cast<const char*>(&count), sizeof count);
  file.write(reinterpret_cast<const char*>(heads.data()), sizeof(Head) * count).write(data.data(), data.size());
  if (!file.flush()) fail("cases", "they cannot be written");
}

void check_output(const std::vector<Emulated>& cases, std::ifstream file) {
  const int use = file.get();
  if (use != static_cast<int>(TileUse::kUsed)) fail("self-check", "TileUse is " + std::to_string(use));
  long long numbers = 0, caught[4] = {};
  for (size_t i = 0; i < cases.size() && g_failures < 20; ++i) {
    const Case& c = cases[i].made;
    Exact<float> y(c.rows * c.n, 0);
    if (!file.read(reinterpret_cast<char*>(y.data()), y.size() * 4)) return fail("output", "it is cut off");
    numbers += y.size();
    for (const Fault fault : {Fault::kOneChain, Fault::kSubnormals, Fault::kOnePlace, Fault::kNone}) {
      tile_state().fault = fault;
      const Exact<float> wanted = compute(c, kModel, 0, c.rows);
      if (fault == Fault::kNone) check_same(wanted, y, 0, c.n, "case " + std::to_string(i) + " " + c.describe(), "in Bochs");
      for (int64_t j = 0; j < y.size(); ++j) caught[static_cast<int>(fault)] += !same(wanted[j], y[j]);
    }
  }
  for (int fault = 1; fault < 4; ++fault) {
    if (caught[fault] == 0) fail("fault " + std::to_string(fault), "a model with it does not differ from the output");
  }
  std::printf("%s: the self-check and %zu products and convolutions in Bochs, %lld numbers; of a model in one chain %lld differ,"
              " with subnormals %lld, with one wrong place %lld\n", g_failures == 0 ? "ok" : "FAILED", cases.size(), numbers, caught[1], caught[2], caught[3]);
}

}  // namespace
}  // namespace bf16kit

int main(int count, char** arguments) {
  using namespace bf16kit;
  g_seed = std::strtoull(arguments[3], nullptr, 10);
  const std::vector<Emulated> cases = make_cases(std::atoi(arguments[2]), count > 5 ? arguments[5] : "");
  if (arguments[1][0] == 'd') write_cases(cases, std::ofstream(arguments[4], std::ios::binary));
  else check_output(cases, std::ifstream(arguments[4], std::ios::binary));
  return g_failures == 0 ? 0 : 1;
}

// Stands in for the TensorRT provider of ONNX Runtime, so that its list of kernels can be asked for without TensorRT.
//
// `get_all_opkernel_def` asks every provider that the build has, and ends the process where one gives no factory. This one
// hands on whatever it is asked to the CUDA provider beside it, whose kernels are then listed twice. The first two entries
// of a provider's table make factories, from a device's number and from options; the order differs by release, so both
// are led to the one that gives a factory for options that are all zero.
#include <dlfcn.h>

#include <cstring>
#include <memory>
#include <string>

namespace {

struct Factory;
using Made = std::shared_ptr<Factory>;
using Make = Made (*)(void* provider, const void* options);

void* original;

void** table_of(void* provider) { return *static_cast<void***>(provider); }

Made make(void*, const void*) {
  static char options[4096];
  for (int entry : {0, 1}) {
    Made made = reinterpret_cast<Make>(table_of(original)[entry])(original, options);
    if (made) return made;
  }
  return nullptr;
}

}  // namespace

extern "C" void* GetProvider() {
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&GetProvider), &here);
  const std::string file = here.dli_fname;
  const std::string cuda = file.substr(0, file.rfind('/')) + "/libonnxruntime_providers_cuda.so";
  original = reinterpret_cast<void* (*)()>(dlsym(dlopen(cuda.c_str(), RTLD_NOW), "GetProvider"))();
  static void* table[16];
  std::memcpy(table, table_of(original), 12 * sizeof(void*));
  table[0] = table[1] = reinterpret_cast<void*>(&make);
  static void* object[1] = {table};
  return object;
}

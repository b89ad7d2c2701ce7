// Errors in ONNX Runtime's format: a status, which becomes an exception in Python. No exception crosses the ABI.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "ort/abi.h"

namespace bf16kit {

// Returns an error with a formatted message, prefixed by "bf16kit kernel: ". The runtime copies the text.
__attribute__((format(printf, 3, 4))) inline abi::Status* error(const abi::Api* api, abi::Code code,
                                                                const char* format, ...) {
  char text[512];
  const int prefix = std::snprintf(text, sizeof text, "bf16kit kernel: ");
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text + prefix, sizeof text - prefix, format, arguments);
  va_end(arguments);
  return abi::call<abi::Status*>(api, abi::kCreateStatus, static_cast<int>(code), static_cast<const char*>(text));
}

}  // namespace bf16kit

// Returns from the function with the status of `expression`, unless that is success (null).
#define BF16KIT_RETURN_IF_ERROR(expression)                         \
  do {                                                              \
    if (::bf16kit::abi::Status* status = (expression)) return status; \
  } while (false)

#include "ort/domain.h"

#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>

#include "ort/operators.h"
#include "ort/status.h"

namespace bf16kit {

using namespace abi;

namespace {

constexpr char kListed[] = "bf16kit.operators";  // open_session (bf16kit/runtime/ort/session.py) sets it
constexpr size_t kLongest = 4096;                // bytes of the list, as of the value of any entry

// A runtime, known by the address of its table, and its domain of the listed operators; of all if nothing is listed. A runtime
// cannot use a domain that another one made: the layouts may differ.
struct Known {
  const Api* api;
  char listed[kLongest];
  Domain* domain;
  Known* next;
};

// Reads the list, which stays empty if the session has none.
Status* read_list(const Api* api, const SessionOptions* options, char (&listed)[kLongest]) {
  int has = 0;
  size_t size = kLongest;
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kHasSessionConfigEntry, options, static_cast<const char*>(kListed), &has));
  if (has == 0) return nullptr;
  return call<Status*>(api, kGetSessionConfigEntry, options, static_cast<const char*>(kListed),
                       static_cast<char*>(listed), &size);
}

bool is_listed(const char* listed, const CustomOp* op) {
  char name[80];
  std::snprintf(name, sizeof name, ",%s,", op->GetName(op));
  return *listed == '\0' || std::strstr(listed, name) != nullptr;
}

Status* fill(const Api* api, const char* listed, Domain* domain) {
  for (size_t i = 0; i < kOperators; ++i) {
    if (!is_listed(listed, operator_at(i))) continue;
    BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kCustomOpDomainAdd, domain, operator_at(i)));
  }
  return nullptr;
}

Status* make(const Api* api, const char* listed, Domain** made) {
  BF16KIT_RETURN_IF_ERROR(call<Status*>(api, kCreateCustomOpDomain, static_cast<const char*>("bf16kit"), made));
  Status* status = fill(api, listed, *made);
  if (status != nullptr) call<void>(api, kReleaseCustomOpDomain, *made);
  return status;
}

}  // namespace

Status* add_domain(const Api* api, SessionOptions* options) {
  static std::mutex mutex;
  static Known* all = nullptr;
  char listed[kLongest] = "";
  BF16KIT_RETURN_IF_ERROR(read_list(api, options, listed));
  const std::lock_guard<std::mutex> lock(mutex);
  Known* known = all;
  while (known != nullptr && (known->api != api || std::strcmp(known->listed, listed) != 0)) known = known->next;
  if (known == nullptr) {
    known = new (std::nothrow) Known{api, "", nullptr, all};
    if (known == nullptr) return error(api, kFail, "out of memory");
    std::memcpy(known->listed, listed, sizeof listed);
    if (Status* status = make(api, listed, &known->domain)) {
      delete known;
      return status;
    }
    all = known;
  }
  return call<Status*>(api, kAddCustomOpDomain, options, known->domain);
}

}  // namespace bf16kit

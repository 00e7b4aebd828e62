// Stands in for Nsight: NVTX loads it through NVTX_INJECTION64_PATH, and it prints every range of every domain to the
// file that NVTX_LISTENER_LOG names. The structures are those of NVTX version 3.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct Attributes {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  int64_t payload;
  int32_t message_type;
  const char* message;  // a registered string is the pointer that register_string returned
};

FILE* log_file() {
  static FILE* file = std::fopen(std::getenv("NVTX_LISTENER_LOG"), "w");
  return file;
}

void* create_domain(const char* name) { return strdup(name); }
void* register_string(void*, const char* text) { return strdup(text); }

void name_category(void* domain, uint32_t category, const char* name) {
  std::fprintf(log_file(), "category %s %u %s\n", static_cast<char*>(domain), category, name);
}

int push(void* domain, const Attributes* a) {
  std::fprintf(log_file(), "push %s %u %s %d\n", static_cast<char*>(domain), a->category, a->message, a->payload_type);
  std::fflush(log_file());
  return 0;
}

int pop(void* domain) {
  std::fprintf(log_file(), "pop %s\n", static_cast<char*>(domain));
  std::fflush(log_file());
  return 0;
}

struct Callbacks {
  size_t struct_size;
  int (*get_module_function_table)(int module, void**** table, unsigned* size);
};

}  // namespace

extern "C" int InitializeInjectionNvtx2(const void* (*get_export_table)(uint32_t)) {
  enum { kCallbacksTable = 1, kCore2 = 5 };
  enum { kRangePushEx = 4, kRangePop = 5, kNameCategoryA = 8, kRegisterStringA = 10, kDomainCreateA = 12 };
  const auto* callbacks = static_cast<const Callbacks*>(get_export_table(kCallbacksTable));
  void*** table = nullptr;
  unsigned size = 0;
  if (!callbacks->get_module_function_table(kCore2, &table, &size) || size <= kDomainCreateA) return 0;
  *table[kRangePushEx] = reinterpret_cast<void*>(push);
  *table[kRangePop] = reinterpret_cast<void*>(pop);
  *table[kNameCategoryA] = reinterpret_cast<void*>(name_category);
  *table[kRegisterStringA] = reinterpret_cast<void*>(register_string);
  *table[kDomainCreateA] = reinterpret_cast<void*>(create_domain);
  return 1;
}

// Errors inside a library are exceptions; abi.h turns them into a KdaStatus and a text.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "../kda.h"

namespace kda {

struct Error : std::runtime_error {
  Error(KdaStatus status, const std::string& text) : std::runtime_error(text), status(status) {}
  KdaStatus status;
};

// printf into a std::string, for error texts.
__attribute__((format(printf, 1, 2))) inline std::string format(const char* pattern, ...) {
  char text[1024];
  va_list values;
  va_start(values, pattern);
  std::vsnprintf(text, sizeof(text), pattern, values);
  va_end(values);
  return text;
}

}  // namespace kda

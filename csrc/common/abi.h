// What every exported function does: nothing may be thrown across the C ABI, and kda_last_error() says what went wrong.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "error.h"

namespace kda {

inline thread_local std::string last_error;

// Runs the body; turns what it throws into a status and keeps the text.
template <class Body>
KdaStatus guard(const Body& body) noexcept {
  try {
    body();
    return KDA_OK;
  } catch (const Error& error) {
    last_error = error.what();
    return error.status;
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
    return KDA_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    last_error = error.what();
    return KDA_INTERNAL_ERROR;
  }
}

}  // namespace kda

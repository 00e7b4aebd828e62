// Ranges on a profiler's timeline, through the callbacks of KdaArgs.
#pragma once

#include "../kda.h"

namespace kda {

// A named range on the profiler's timeline for as long as it lives; costs one comparison where no profiler listens.
class Range {
 public:
  Range(const KdaArgs& args, const char* name) : pop_(args.pop_range) {
    if (args.push_range) args.push_range(name);
  }
  ~Range() {
    if (pop_) pop_();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  void (*pop_)(void);
};

}  // namespace kda

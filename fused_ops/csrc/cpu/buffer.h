// Memory of a thread that is kept for its next call, since fresh pages take longer than the products that use them.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

namespace mz {

template <typename V> class Buffer {
  struct Free { void operator()(V* p) const { ::operator delete(p, std::align_val_t(64)); } };
  std::unique_ptr<V, Free> memory;
  int64_t size = 0;

 public:
  V* of(int64_t n) {
    if (n > size) {
      memory.reset(static_cast<V*>(::operator new(n * sizeof(V), std::align_val_t(64))));
      memset(static_cast<void*>(memory.get()), 0, n * sizeof(V));
      size = n;
    }
    return memory.get();
  }
};

}  // namespace mz

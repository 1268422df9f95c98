// Memory of tensors in the host's heap, of which a freed one fits the next tensor of its size.
//
// torch aligns tensors with posix_memalign. glibc answers that with a larger piece of the heap and gives back both of its
// ends, so that the hole which the tensor leaves is too small for the same call. The next tensor of its size then takes
// new pages, until neighbours are freed: a step had holes of 0.4 of what comes and goes in it, and of 1.5 where blocks are
// computed again. Here a tensor keeps all that was asked for, and its hole fits.
#ifndef MZ_BORROWED  // tests of another processor's product have no torch to link to
#include <cstdint>
#include <cstdlib>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "../cpu/kernel.h"

namespace {

constexpr uintptr_t LINE = 64;  // bytes to which torch aligns tensors

// In front of a tensor is where its piece of the heap begins: malloc aligns to 16 bytes, so there is room for that.
void* begin_of(void* tensor) { return static_cast<void**>(tensor)[-1]; }

void release(void* tensor) {
  if (tensor == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(tensor);
  std::free(begin_of(tensor));
}

class HostTensors final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* tensor = nullptr;
    if (bytes > 0) {
      void* piece = bytes + LINE > bytes ? std::malloc(bytes + LINE) : nullptr;
      TORCH_CHECK(piece != nullptr, "DefaultCPUAllocator: can't allocate memory: you tried to allocate ", bytes, " bytes.");
      tensor = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(piece) + LINE) & ~(LINE - 1));
      static_cast<void**>(tensor)[-1] = piece;
      c10::profiledCPUMemoryReporter().New(tensor, bytes);
    }
    return {tensor, tensor, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

HostTensors host_tensors;  // lives as long as the process: tensors are freed to its end

}  // namespace

// Tensors that exist already are freed as they were allocated. torch's own allocator has priority 0.
MZ_API void take_host_tensors(int64_t) { c10::SetCPUAllocator(&host_tensors, 1); }
#endif

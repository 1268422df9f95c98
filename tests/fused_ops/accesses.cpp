// What emulated kernels do with memory: every access is counted, and races are found.
//
// The kernels are compiled with -fsanitize=thread, by which the compiler calls a function at every load and store. Here
// are those functions, in place of the sanitizer's own. So no access is missed, and kernels need no change. The
// emulation tells which thread of which block runs and when threads have met (MZ_WATCHED in
// fused_ops/csrc/cuda/emulation.h).
//
// Every byte of shared and of global memory has a cell: who wrote it last and who has read it, and at which barrier.
// Two accesses to a byte, at least one a write, are a race if nothing puts one before the other:
//   a barrier of the block between them, or a barrier of the warp if both are of one warp. (A shuffle orders no memory.)
// Nothing orders two blocks of a launch. Launches are ordered.
//
// Shared memory is what the kernels' library has as its own data. Global memory is all that is not a stack and not the
// emulation's.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

constexpr int WARP = 32, THREADS = 1024, PAGE = 1 << 12, WIDTHS = 5;  // accesses of 1, 2, 4, 8 and 16 bytes

struct Span {
  uintptr_t begin = 0, end = 0;
  bool has(uintptr_t at) const { return at - begin < end - begin; }
};
Span span(const void* begin, size_t bytes) { return {(uintptr_t)begin, (uintptr_t)begin + bytes}; }

// Bytes of a launch in some range of memory. fetched, stored: each byte once. A byte that the launch itself has written
// before needs no fetching.
struct Count {
  uint64_t read, fetched, written, stored, loads[WIDTHS], stores[WIDTHS];
};

struct Launch {
  uintptr_t kernel;  // relative to its library
  std::vector<Count> counts;  // of each range, and at the end of what lies in none
};

// An access: numbers of blocks and barriers go up over all launches.
struct Stamp {
  uint32_t block = 0, barrier = 0;
  uint16_t thread = 0, warp_barrier = 0;
  bool same_warp(const Stamp& other) const { return block == other.block && thread / WARP == other.thread / WARP; }
  bool same_thread(const Stamp& other) const { return block == other.block && thread == other.thread; }
  bool before(const Stamp& now) const {
    if (block != now.block) return false;
    return thread == now.thread || barrier != now.barrier || (same_warp(now) && warp_barrier != now.warp_barrier);
  }
};

// life: the launch or, of shared memory, the block that the rest is about. reader: the last. other: one of another
// warp, or where there is none since the barrier, the last of another thread. first_block: of all readers.
struct Cell {
  uint32_t life = 0;
  Stamp writer, reader, other;
  uint32_t first_block = 0;
  bool written = false, read = false, read_by_two = false, read_by_blocks = false;

  void add_reader(const Stamp& now) {
    if (!read) first_block = now.block;
    else if (first_block != now.block) read_by_blocks = true;
    bool current = read_by_two && other.block == now.block && other.barrier == now.barrier;
    if (read && !(reader.same_warp(now) ? (current && !other.same_warp(now)) || reader.same_thread(now) : false))
      other = reader, read_by_two = true;
    reader = now, read = true;
  }
  bool has_unordered_reader(const Stamp& now) const {
    return read && (read_by_blocks || first_block != now.block || !reader.before(now) || (read_by_two && !other.before(now)));
  }
};

struct Page {
  Cell cells[PAGE];
};

struct Watch {
  bool active = false, running = false;
  uint32_t launch = 0, block = 0, barrier = 0;
  uint16_t thread = 0, warp_barriers[THREADS];
  unsigned x = 0, y = 0;
  Span stack, host_stack, fibers, own_data, library[8], thread_local_data;
  int segments = 0;
  std::vector<Span> ranges;
  std::vector<Launch> launches;
  std::unordered_map<uintptr_t, Page> pages;
  uintptr_t page_number = 0;
  Page* page = nullptr;  // the one of the last access
  std::vector<std::string> faults;
  std::unordered_set<std::string> told;  // of this launch

  void fault(const char* what, uintptr_t at, bool shared) {
    if (!told.insert(what + std::string(shared ? "s" : "g")).second) return;
    char text[400];
    size_t range = range_of(at);
    int said = snprintf(text, sizeof text, "kernel %#zx: %s %s memory, block (%u, %u), thread %u", (size_t)launches.back().kernel, what,
                        shared ? "shared" : "global", x, y, thread);
    if (shared) snprintf(text + said, sizeof text - said, ", byte %zu", (size_t)(at - own_data.begin));
    else if (range < ranges.size()) snprintf(text + said, sizeof text - said, ", byte %zu of tensor %zu", (size_t)(at - ranges[range].begin), range);
    faults.push_back(text);
  }
  size_t range_of(uintptr_t at) const {
    for (size_t i = 0; i < ranges.size(); ++i)
      if (ranges[i].has(at)) return i;
    return ranges.size();
  }
  bool is_of_emulation(uintptr_t at) const {
    if (stack.has(at) || host_stack.has(at) || fibers.has(at) || thread_local_data.has(at)) return true;
    for (int i = 0; i < segments; ++i)
      if (library[i].has(at)) return true;
    return false;
  }
  Cell& cell(uintptr_t at, bool shared) {
    if (!page || page_number != at / PAGE) page_number = at / PAGE, page = &pages[page_number];
    Cell& found = page->cells[at % PAGE];
    uint32_t life = shared ? block : launch;
    if (found.life != life) found = Cell(), found.life = life;
    return found;
  }
  void access(const void* pointer, size_t bytes, bool write) {
    uintptr_t first = (uintptr_t)pointer;
    if (!running || is_of_emulation(first)) return;
    bool shared = own_data.has(first);
    Stamp now;
    now.block = block, now.barrier = barrier, now.thread = thread, now.warp_barrier = warp_barriers[thread];
    Count ignored{}, &count = shared ? ignored : launches.back().counts[range_of(first)];
    int width = std::min(WIDTHS - 1, 63 - __builtin_clzll(bytes));
    if (write) count.written += bytes, count.stores[width] += 1;
    else count.read += bytes, count.loads[width] += 1;
    for (uintptr_t at = first; at < first + bytes; ++at) {
      Cell& own = cell(at, shared);
      if (own.written && !own.writer.before(now)) {
        bool blocks = own.writer.block != now.block;
        fault(write ? (blocks ? "two blocks write the same" : "two threads write, without a barrier between, the same")
                    : (blocks ? "a block reads what another writes in" : "a thread reads, without a barrier between, what another wrote in"),
              at, shared);
      }
      if (write && own.has_unordered_reader(now))
        fault(own.read_by_blocks || own.first_block != now.block ? "a block writes what another reads in"
                                                                 : "a thread writes, without a barrier between, what another read in", at, shared);
      if (!write && shared && !own.written) fault("a thread reads what none of its block has written in", at, shared);
      if (write) {
        if (!own.written) count.stored += 1;
        own.written = true, own.writer = now;
      } else {
        if (!own.read && !own.written) count.fetched += 1;
        own.add_reader(now);
      }
    }
  }
};

Watch watch;

// The segments and the thread's own data of the library that holds a kernel.
int find_library(dl_phdr_info* info, size_t, void* kernel) {
  uintptr_t at = (uintptr_t)kernel;
  bool holds = false;
  for (int i = 0; i < info->dlpi_phnum; ++i)
    if (info->dlpi_phdr[i].p_type == PT_LOAD) holds |= at - info->dlpi_addr - info->dlpi_phdr[i].p_vaddr < info->dlpi_phdr[i].p_memsz;
  if (!holds) return 0;
  watch.segments = 0, watch.own_data = watch.thread_local_data = Span();
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = info->dlpi_phdr[i];
    Span found = span((const void*)(info->dlpi_addr + part.p_vaddr), part.p_memsz);
    if (part.p_type == PT_LOAD && part.p_flags & PF_W) watch.own_data = found;
    else if (part.p_type == PT_LOAD && watch.segments < 8) watch.library[watch.segments++] = found;
    if (part.p_type == PT_TLS && info->dlpi_tls_data) watch.thread_local_data = span(info->dlpi_tls_data, part.p_memsz);
  }
  return 1;
}

Span stack_of_this_thread() {
  static thread_local Span found;
  if (!found.end) {
    pthread_attr_t attributes;
    void* begin;
    size_t bytes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &begin, &bytes);
    pthread_attr_destroy(&attributes);
    found = span(begin, bytes);
  }
  return found;
}

}  // namespace

extern "C" {

// Of the emulation.
void watch_launch(const void* kernel, const void* fibers, size_t bytes) {
  if (!watch.active) return;
  dl_iterate_phdr(find_library, const_cast<void*>(kernel));
  Dl_info info;
  dladdr(kernel, &info);
  watch.fibers = span(fibers, bytes), watch.host_stack = stack_of_this_thread();
  watch.launches.push_back({(uintptr_t)kernel - (uintptr_t)info.dli_fbase, std::vector<Count>(watch.ranges.size() + 1, Count{})});
  watch.told.clear();
  ++watch.launch;
}
void watch_launch_end() { watch.running = false; }
void watch_block(unsigned x, unsigned y) {
  watch.x = x, watch.y = y;
  ++watch.block, ++watch.barrier;
  std::fill_n(watch.warp_barriers, THREADS, 0);
}
void watch_thread(int thread, const void* stack, size_t bytes) {
  watch.thread = (uint16_t)thread, watch.stack = span(stack, bytes), watch.running = watch.active;
}
void watch_barrier() { ++watch.barrier; }
void watch_warp_barrier() { ++watch.warp_barriers[watch.thread]; }

// Of the tests. Ranges are numbered in the order in which they are given.
void watch_begin() {
  watch.active = true;
  watch.launches.clear(), watch.ranges.clear(), watch.faults.clear();
  if (watch.pages.size() > 1000) watch.pages.clear(), watch.page = nullptr;  // 200 MB; cells of earlier launches count for nothing
}
void watch_end() { watch.active = false; }
void watch_range(const void* begin, size_t bytes) { watch.ranges.push_back(span(begin, bytes)); }
size_t watch_launches() { return watch.launches.size(); }
uintptr_t watch_kernel(size_t launch) { return watch.launches[launch].kernel; }
void watch_count(size_t launch, size_t range, Count* to) { *to = watch.launches[launch].counts[range]; }
size_t watch_faults() { return watch.faults.size(); }
const char* watch_fault(size_t number) { return watch.faults[number].c_str(); }

// Of the compiler.
#define ACCESSES(BYTES)                                                               \
  void __tsan_read##BYTES(void* at) { watch.access(at, BYTES, false); }               \
  void __tsan_write##BYTES(void* at) { watch.access(at, BYTES, true); }               \
  void __tsan_unaligned_read##BYTES(void* at) { watch.access(at, BYTES, false); }     \
  void __tsan_unaligned_write##BYTES(void* at) { watch.access(at, BYTES, true); }
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
void __tsan_read_range(void* at, size_t bytes) { watch.access(at, bytes, false); }
void __tsan_write_range(void* at, size_t bytes) { watch.access(at, bytes, true); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

}  // extern "C"

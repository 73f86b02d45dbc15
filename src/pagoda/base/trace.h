// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "pagoda/base/clock.h"

/// What happened when, as a file that chrome://tracing and ui.perfetto.dev open.
///
///   void Pager::fetch(...) {
///     PAGODA_TRACE("pager", "fetch");            // one slice on this thread, until the scope ends
///     PAGODA_TRACE("pager", "fetch", {"bytes", n}, {"page", name});   // evaluated if recording
///
/// Recording is off until start(); a scope then costs a relaxed load and a branch (`pagoda bench
/// base` shows it). One recorder serves the process; all functions may be called from any thread.
namespace pagoda::trace {

namespace detail {
extern std::atomic<bool> recording;
}

/// Whether events are being kept.
inline bool on() noexcept {
  return detail::recording.load(std::memory_order_relaxed);
}

/// A fact about an event, shown when it is selected.
struct Arg {
  const char* key;
  double number = 0;
  std::string text;
  bool is_text = false;

  template <class T>
  requires std::is_arithmetic_v<T> Arg(const char* arg_key, T value)
      : key(arg_key), number(static_cast<double>(value)) {}
  Arg(const char* arg_key, std::string_view value) : key(arg_key), text(value), is_text(true) {}
};
using Args = std::vector<Arg>;

/// A finished slice. `track` empty: this thread's own; else a named one of its own (a copy stream,
/// a disk). Slices of one track must nest or follow each other.
void slice(std::string_view category, std::string_view name, Nanos begin, Nanos end,
           const Args& args = {}, std::string_view track = {});
/// A moment on this thread.
void instant(std::string_view category, std::string_view name, const Args& args = {});
/// Names this thread in traces.
void name_thread(std::string_view name);

/// Begins a recording and drops the last one. Beyond `max_events` a thread's further events are
/// counted and dropped, never the process's memory.
void start(std::size_t max_events_per_thread = 1'000'000);
/// Ends the recording.
void stop();
/// Writes what was recorded, as Chrome's JSON, to a file that appears whole or not at all; to what
/// a symbolic link names, and straight to a character device. EngineError with the path and errno
/// if it cannot, and for whatever else the path names (a pipe, which could block).
void write(const std::filesystem::path& path);
/// std::system_error unless a file can be made there. Leaves one that is there as it is.
void require_writable(const std::filesystem::path& path);
/// The same as text.
std::string to_json();

/// A slice from its making to the end of its scope; what PAGODA_TRACE makes. Names are literals.
/// `MakeArgs` is called at the end of the scope, and only while recording.
template <class MakeArgs>
class Scope {
 public:
  Scope(const char* category, const char* name, MakeArgs make_args) noexcept
      : category_(category),
        name_(name),
        begin_(on() ? now_ns() : 0),
        make_args_(std::move(make_args)) {}
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope() {
    if (begin_ != 0) [[unlikely]]
      finish();
  }

 private:
  [[gnu::noinline, gnu::cold]] void finish() noexcept {
    try {
      slice(category_, name_, begin_, now_ns(), make_args_());
    } catch (...) {  // out of memory: a trace never stops the work it describes
    }
  }

  const char* category_;
  const char* name_;
  Nanos begin_;  // 0: not recorded
  [[no_unique_address]] MakeArgs make_args_;
};

}  // namespace pagoda::trace

#define PAGODA_TRACE_JOIN2(a, b) a##b
#define PAGODA_TRACE_JOIN(a, b) PAGODA_TRACE_JOIN2(a, b)
/// Records the rest of this scope as a slice of `category` named `name`, both literals. Arguments
/// are `{"key", value}` pairs.
#define PAGODA_TRACE(category, name, ...)                                  \
  const ::pagoda::trace::Scope PAGODA_TRACE_JOIN(pagoda_trace_, __LINE__)( \
      category, name, [&]() -> ::pagoda::trace::Args { return {__VA_ARGS__}; })

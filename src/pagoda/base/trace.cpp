// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/trace.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>

#include <unistd.h>

#include "pagoda/base/error.h"
#include "pagoda/base/json_text.h"
#include "pagoda/base/ranked_mutex.h"

namespace pagoda::trace {

std::atomic<bool> detail::recording{false};

namespace {

struct Event {
  char phase;  // Chrome's letters: X slice, i instant, C counter
  Nanos begin;
  Nanos duration;
  std::string category;
  std::string name;
  std::string track;
  Args args;
};

/// The events of one thread. The lock is taken by that thread alone until someone reads, so it is
/// free of contention while recording.
struct ThreadEvents {
  RankedMutex<LockRank::TraceThread> mutex;
  std::string name;  // guarded by mutex, as is all below
  std::vector<Event> events;
  std::size_t dropped = 0;
  int id = 0;
};

/// Every thread that ever recorded or was named. Never destroyed: threads may outlive main().
struct Recorder {
  RankedMutex<LockRank::TraceRegistry> mutex;
  std::vector<std::shared_ptr<ThreadEvents>> threads;  // guarded by mutex
  std::atomic<std::size_t> max_events{0};
  std::atomic<Nanos> origin{0};
};

Recorder& recorder() {
  static Recorder* instance = new Recorder;
  return *instance;
}

ThreadEvents& this_thread() {
  thread_local const std::shared_ptr<ThreadEvents> mine = [] {
    auto made = std::make_shared<ThreadEvents>();
    made->id = static_cast<int>(::gettid());
    Recorder& all = recorder();
    const std::lock_guard lock(all.mutex);
    all.threads.push_back(made);
    return made;
  }();
  return *mine;
}

void keep(Event event) {
  if (!on()) return;
  ThreadEvents& mine = this_thread();
  const std::lock_guard lock(mine.mutex);
  if (mine.events.size() >= recorder().max_events.load(std::memory_order_relaxed)) {
    ++mine.dropped;
    return;
  }
  mine.events.push_back(std::move(event));
}

double microseconds(Nanos ns) {
  return static_cast<double>(ns) * 1e-3;
}

std::string number_text(double value) {
  if (!std::isfinite(value)) return json_text(fmt::format("{}", value));
  return fmt::format("{}", value);
}

std::string args_json(const Args& args) {
  std::string out = "{";
  for (const Arg& arg : args) {
    if (out.size() > 1) out += ',';
    out += json_text(arg.key) + ":" + (arg.is_text ? json_text(arg.text) : number_text(arg.number));
  }
  return out + "}";
}

std::string metadata_json(std::string_view what, int track, std::string_view name) {
  return fmt::format(R"({{"name":"{}","ph":"M","pid":1,"tid":{},"args":{{"name":{}}}}})", what,
                     track, json_text(name));
}

std::string event_json(const Event& event, int track, Nanos origin) {
  std::string out = fmt::format(R"({{"name":{},"cat":{},"ph":"{}","pid":1,"tid":{},"ts":{:.3f})",
                                json_text(event.name), json_text(event.category), event.phase,
                                track, microseconds(event.begin - origin));
  if (event.phase == 'X') out += fmt::format(R"(,"dur":{:.3f})", microseconds(event.duration));
  if (event.phase == 'i') out += R"(,"s":"t")";
  if (!event.args.empty()) out += R"(,"args":)" + args_json(event.args);
  return out + "}";
}

}  // namespace

void slice(std::string_view category, std::string_view name, Nanos begin, Nanos end,
           const Args& args, std::string_view track) {
  if (!on()) return;
  keep({'X', begin, end - begin, std::string(category), std::string(name), std::string(track),
        args});
}

void instant(std::string_view category, std::string_view name, const Args& args) {
  if (!on()) return;
  keep({'i', now_ns(), 0, std::string(category), std::string(name), {}, args});
}

void counter(std::string_view name, double value) {
  if (!on()) return;
  keep({'C', now_ns(), 0, "counter", std::string(name), {}, {{"value", value}}});
}

void name_thread(std::string_view name) {
  ThreadEvents& mine = this_thread();
  const std::lock_guard lock(mine.mutex);
  mine.name = name;
}

void start(std::size_t max_events_per_thread) {
  Recorder& all = recorder();
  const std::lock_guard lock(all.mutex);
  // Threads that have ended are known by nobody but us: forget them with their events.
  std::erase_if(all.threads, [](const auto& thread) { return thread.use_count() == 1; });
  for (const auto& thread : all.threads) {
    const std::lock_guard thread_lock(thread->mutex);
    thread->events.clear();
    thread->dropped = 0;
  }
  all.max_events = max_events_per_thread;
  all.origin = now_ns();
  detail::recording = true;
}

void stop() {
  detail::recording = false;
}

std::string to_json() {
  Recorder& all = recorder();
  const std::lock_guard lock(all.mutex);
  std::map<std::string, int> tracks;  // named tracks, numbered above any thread id
  std::string out = R"({"displayTimeUnit":"ms","traceEvents":[)"
                    "\n";
  out += metadata_json("process_name", 0, "pagoda");
  std::size_t dropped = 0;
  for (const auto& thread : all.threads) {
    const std::lock_guard thread_lock(thread->mutex);
    dropped += thread->dropped;
    if (thread->events.empty()) continue;
    if (!thread->name.empty())
      out += ",\n" + metadata_json("thread_name", thread->id, thread->name);
    for (const Event& event : thread->events) {
      int track = thread->id;
      if (!event.track.empty()) {
        const int next = (1 << 30) + static_cast<int>(tracks.size());
        const auto [it, fresh] = tracks.emplace(event.track, next);
        track = it->second;
        if (fresh) out += ",\n" + metadata_json("thread_name", track, event.track);
      }
      out += ",\n" + event_json(event, track, all.origin);
    }
  }
  out += fmt::format("\n],\"otherData\":{{\"dropped_events\":{}}}}}\n", dropped);
  return out;
}

void write(const std::filesystem::path& path) {
  const std::string text = to_json();
  const std::filesystem::path part = path.string() + ".part";
  std::FILE* file = std::fopen(part.c_str(), "w");
  const bool written =
      file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = file != nullptr && std::fclose(file) == 0;
  if (!written || !closed || std::rename(part.c_str(), path.c_str()) != 0) {
    const int error = errno;
    if (file != nullptr) ::unlink(part.c_str());
    throw EngineError("cannot write the trace file",
                      {context("path", path.string()), context("errno", error),
                       context("cause", std::generic_category().message(error))});
  }
}

}  // namespace pagoda::trace

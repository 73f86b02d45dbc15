// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/trace.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>

#include <sys/stat.h>
#include <unistd.h>

#include "pagoda/base/error.h"
#include "pagoda/base/json_text.h"
#include "pagoda/base/ranked_mutex.h"

namespace pagoda::trace {

std::atomic<bool> detail::recording{false};

namespace {

struct Event {
  char phase;  // Chrome's letters: X slice, i instant
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

[[noreturn]] void fail_to_write(const std::filesystem::path& path, int error) {
  throw EngineError("cannot write the trace file",
                    {context("path", path.string()), context("errno", error),
                     context("cause", std::generic_category().message(error))});
}

/// What a chain of symbolic links ends with, which need not exist: the links stay what they are.
std::filesystem::path followed(const std::filesystem::path& path) {
  constexpr int kMostLinks = 40;  // as the kernel follows
  std::filesystem::path out = path;
  std::error_code none;
  for (int i = 0; std::filesystem::is_symlink(out, none); ++i) {
    if (i == kMostLinks) throw std::system_error(ELOOP, std::generic_category());
    out = out.parent_path() / std::filesystem::read_symlink(out);
  }
  return out;
}

/// The text is in the file `to`, or EngineError names `path`.
void put(const std::string& text, const std::filesystem::path& to,
         const std::filesystem::path& path) {
  std::FILE* file = std::fopen(to.c_str(), "w");
  if (file == nullptr) fail_to_write(path, errno);
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int error = errno;
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed) fail_to_write(path, written ? errno : error);
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

namespace {

/// Where a trace goes: into a character device itself, or beside the file whose place it takes.
struct Target {
  std::filesystem::path file;
  std::filesystem::path part;  // the same: a device

  bool replaces() const { return part != file; }
};

/// Throws std::system_error for what is neither a file nor a character device.
Target target_of(const std::filesystem::path& path) {
  struct stat there {};
  const bool exists = ::stat(path.c_str(), &there) == 0;
  if (exists && S_ISCHR(there.st_mode)) return {path, path};
  if (exists && !S_ISREG(there.st_mode)) {
    throw std::system_error(S_ISDIR(there.st_mode) ? EISDIR : ENOTSUP, std::generic_category());
  }
  std::filesystem::path file = followed(path);
  std::filesystem::path part = file.string() + ".part";
  return {std::move(file), std::move(part)};
}

}  // namespace

void require_writable(const std::filesystem::path& path) {
  const Target target = target_of(path);
  std::FILE* file = std::fopen(target.part.c_str(), "w");
  if (file == nullptr) throw std::system_error(errno, std::generic_category());
  static_cast<void>(std::fclose(file));
  if (target.replaces()) ::unlink(target.part.c_str());
}

void write(const std::filesystem::path& path) {
  const std::string text = to_json();
  Target target;
  try {
    target = target_of(path);
  } catch (const std::system_error& error) {
    fail_to_write(path, error.code().value());
  }
  try {
    put(text, target.part, path);
    if (target.replaces() && std::rename(target.part.c_str(), target.file.c_str()) != 0) {
      fail_to_write(path, errno);
    }
  } catch (const EngineError&) {
    if (target.replaces()) ::unlink(target.part.c_str());
    throw;
  }
}

}  // namespace pagoda::trace

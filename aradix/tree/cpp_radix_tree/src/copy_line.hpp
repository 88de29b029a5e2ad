// Pages copied in order on a thread that needs no GIL for it: the queue behind aradix.memory.lines.LineStream.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

namespace aradix {

namespace nb = nanobind;

// Where the pages of two pools lie: two arrays of one shape but for the first dimension, which counts pages.
class PageViews {
public:
    PageViews(nb::object source, nb::object target);

    int64_t num_source_pages = 0, num_target_pages = 0;

    // The first half of `pages` to the second. Touches no Python object.
    void copy(const std::vector<int64_t> &pages) const;

private:
    struct Piece {
        int64_t source, target;  // bytes from the beginning of the page
    };
    nb::object source_array_, target_array_;  // keep the memory
    const char *source_ = nullptr;
    char *target_ = nullptr;
    int64_t source_stride_ = 0, target_stride_ = 0;
    size_t piece_bytes_ = 0;
    std::vector<Piece> pieces_;

    template <class CopyPiece> void copy_pieces(const std::vector<int64_t> &pages, CopyPiece copy_piece) const;
};

// A point that is reached once; the twin of aradix.memory.streams.Marker, whose `wait` is Python's.
class Marker {
public:
    bool done() const { return state_.load(std::memory_order_acquire) == kDone; }
    // Without the GIL; whether there are callbacks, which somebody with the GIL has to call.
    bool reach() { return state_.exchange(kDone, std::memory_order_acq_rel) == kAwaited; }
    // False where it is reached, and then `callback` is the caller's to call.
    bool add(nb::object callback);
    // The callbacks, once.
    nb::list take();

    int traverse(visitproc visit, void *arg) const;
    void clear() { std::vector<nb::object>().swap(callbacks_); }

private:
    enum State : int { kOpen, kAwaited, kDone };
    std::atomic<int> state_{kOpen};
    std::vector<nb::object> callbacks_;  // the GIL's
};

// What a stream was given, in order. One thread lives in `run`, another one takes the markers that were reached and have
// callbacks: so copies go on while Python is busy, whoever has to be told.
class CopyLine {
public:
    ~CopyLine();

    // A step in Python; None is the end.
    void put(nb::object step);
    void put_copy(nb::object views, nb::object source_pages, nb::object target_pages);
    void put_mark(nb::object marker);

    // Does what needs no Python until a step that does, and gives that: a new reference, None at the end. Without the
    // GIL; for one thread.
    PyObject *run();
    // The next marker whose callbacks are to be called: a new reference, None after the end. Without the GIL.
    PyObject *next_reached();

private:
    enum class Kind { call, copy, mark, end };
    struct Step {
        Kind kind;
        PyObject *object;  // owned: the step, the views or the marker
        const PageViews *views = nullptr;
        Marker *marker = nullptr;
        std::vector<int64_t> pages = {};  // the sources, then the targets
    };

    void push(Step step);

    std::mutex mutex_;
    std::condition_variable has_steps_, has_reached_;
    std::deque<Step> steps_;
    std::deque<PyObject *> reached_;
    std::vector<PyObject *> spent_;  // references to be given up by whoever has the GIL
    bool ended_ = false;
};

void add_copy_line(nb::module_ &module);

}  // namespace aradix

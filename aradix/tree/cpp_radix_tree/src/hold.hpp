// What one lease has in its hands: the compiled twin of aradix.cache.hold.Hold, which says what each field is.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace aradix {

namespace nb = nanobind;

class Hold {
public:
    Hold(int64_t order, nb::object key, nb::object given, int64_t limit, nb::object priority, bool store, bool resume,
         nb::object stream, nb::object opened_in, int64_t opened_near, double opened_when);

    int64_t order, limit, opened_near;
    double opened_when;
    nb::object key, given, priority, stream, used, task, opened_in;
    int64_t num_opened = 0;
    int64_t node_id = 0;
    int64_t num_matched = 0;
    int64_t published = 0;
    int64_t committed = 0;
    int64_t num_own = 0;
    int64_t version = 0;
    bool store, resume;
    bool opening = false;
    bool entered = false;
    bool held = false;
    bool released = false;
    bool counted = false;
    bool waiting = false;

    int64_t num_tokens() const { return published + num_own; }
    int64_t num_own_slots() const { return static_cast<int64_t>(slots_.size() - start_); }
    int64_t fresh_slots_for(int64_t num_tokens, int64_t page_size) const;

    nb::object own() const;  // a copy
    void add(nb::handle slots, int64_t num_tokens);
    void take_front(int64_t num_slots);
    nb::object cut(int64_t num_own, int64_t page_size);

    // Whether a stream may touch its slots.
    bool fences() const { return !stream.is_none() || !used.is_none(); }

    // For the tree: the own slots, and room for so many more at their end.
    const int64_t *own_data() const { return slots_.data() + start_; }
    int64_t *extend(int64_t num_slots);
    // Undoes an `extend` of which nothing was written.
    void unextend(int64_t num_slots) { slots_.resize(slots_.size() - static_cast<size_t>(num_slots)); }
    void drop_all();

    int traverse(visitproc visit, void *arg) const;
    void clear();

private:
    void shrink();

    // The own slots are those from `start_` on: what goes at the front costs nothing.
    std::vector<int64_t> slots_;
    size_t start_ = 0;
};

}  // namespace aradix

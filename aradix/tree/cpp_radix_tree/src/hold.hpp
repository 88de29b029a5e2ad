// What one lease has in its hands: the compiled twin of aradix.cache.hold.Hold, which says what each field is.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "slot_run.hpp"

namespace aradix {

namespace nb = nanobind;

class Hold {
public:
    Hold(int64_t order, nb::object key, nb::object given, int64_t limit, nb::object priority, bool store, bool resume,
         nb::object stream, nb::object opened_in, int64_t opened_near, double opened_when, int64_t page_size);

    int64_t order, limit, opened_near, page_size;
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
    bool joins = false;

    int64_t num_tokens() const { return published + num_own; }
    int64_t num_own_slots() const { return static_cast<int64_t>(slots_.count(page_items())); }
    int64_t fresh_slots_for(int64_t num_tokens) const;

    nb::object own() const;  // a copy
    void add(nb::handle slots, int64_t num_tokens);
    void take_front(int64_t num_slots);
    nb::object cut(int64_t num_own);

    // Whether a stream may touch its slots.
    bool fences() const { return !stream.is_none() || !used.is_none(); }

    // For the tree. Own slots that are whole pages, as an allocator's are, lie here as pages; others take the long way.
    bool has_pages() const { return !slots_.is_wide(); }
    const SlotRun &own_run() const { return slots_; }
    int32_t *extend(int64_t num_pages) { return slots_.extend(static_cast<size_t>(num_pages)); }
    // Undoes an `extend` of which nothing is to stay.
    void unextend(int64_t num_pages) { slots_.drop_back(static_cast<size_t>(num_pages) * page_items(), page_items()); }
    SlotRun take_front_run(int64_t num_slots);
    void copy_own(int64_t *out, int64_t num_slots) const {
        slots_.copy_to(out, 0, static_cast<size_t>(num_slots), page_items());
    }
    void drop_all();

    int traverse(visitproc visit, void *arg) const;
    void clear();

private:
    size_t page_items() const { return static_cast<size_t>(page_size); }

    SlotRun slots_;
};

}  // namespace aradix

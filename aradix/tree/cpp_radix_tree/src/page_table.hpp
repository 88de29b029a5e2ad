// Where each page of a pool is, and the stack of the free ones: the twin of aradix.memory.page_table.PythonPageTable.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace aradix {

namespace nb = nanobind;

// Works on arrays that Python made and audits: `states` (uint8, one a page and one for the padding) and `stack` (int32).
// `counts` has the pages by state, of those that are not free. The numbers of the states are Python's; of them only
// `free` is known here.
class PageTable {
public:
    static constexpr size_t kNumStates = 8;

    PageTable(nb::object states, nb::object stack, int64_t page_size, int free);

    int64_t num_free = 0;
    int64_t num_pages = 0;
    int64_t page_size = 1;
    bool quiet = true;

    nb::list counts() const;
    int64_t count(int state) const { return counts_[checked_state(state)]; }
    int64_t free_slots() const { return num_free * page_size; }

    // `num_slots` slots, all or none; None also where they are no whole pages.
    nb::object take(int64_t num_slots, int state);
    bool take_run(int64_t *out, int64_t num_slots, int state);
    // Frees `slots`, the first page on top; false, and then nothing was changed, unless they are whole pages, each in
    // ascending order, distinct and in `origin`.
    bool give(nb::handle slots, int origin);
    bool give_run(const int64_t *slots, size_t count, int origin);

    nb::object pop(int64_t num_pages, int state);
    void push(nb::handle pages, int origin);
    void move(nb::handle pages, int origin, int state);
    void claim(nb::handle pages, int state);

    const nb::object &states_array() const { return states_array_; }
    const nb::object &stack_array() const { return stack_array_; }

private:
    static size_t checked_state(int state);
    void mark(nb::handle pages, int state, size_t &count);

    nb::object states_array_, stack_array_;
    uint8_t *states_;
    int32_t *stack_;
    uint8_t free_;
    int64_t counts_[kNumStates] = {};
    std::vector<int32_t> pages_;  // of the call under way; kept for its block
};

}  // namespace aradix

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
    bool take_pages(int32_t *out, int64_t num_pages, int state);
    // Frees `slots`, the first page on top; false, and then nothing was changed, unless they are whole pages, each in
    // ascending order, distinct and in `origin`.
    bool give(nb::handle slots, int origin);
    bool give_pages(const int32_t *pages, size_t count, int origin);
    // Whether all of them are pages of this table, and in that state.
    bool has_all(const int32_t *pages, size_t count, int state) const;

    nb::object pop(int64_t num_pages, int state);
    void push(nb::handle pages, int origin);
    void move(nb::handle pages, int origin, int state);
    void claim(nb::handle pages, int state);

    const nb::object &states_array() const { return states_array_; }
    const nb::object &stack_array() const { return stack_array_; }

private:
    static size_t checked_state(int state);
    void mark(nb::handle pages, int state, size_t &count);
    void set_states(const int32_t *pages, size_t count, uint8_t state);
    // Marks pages as free, one by one or many at once, up to the first that is not in `from`; how many it were.
    size_t free_while(const int32_t *pages, size_t count, uint8_t from);
    bool is_run_of(const int32_t *pages, uint8_t state) const;
    bool is_page_of(int32_t page, uint8_t state) const {
        return page >= 1 && page <= num_pages && states_[page] == state;
    }

    nb::object states_array_, stack_array_;
    uint8_t *states_;
    int32_t *stack_;
    uint8_t free_;
    int64_t counts_[kNumStates] = {};
    std::vector<int32_t> pages_;  // of the call under way; kept for its block
};

}  // namespace aradix

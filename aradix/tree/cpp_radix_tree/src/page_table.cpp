#include "page_table.hpp"

#include "pages.hpp"
#include "python_records.hpp"

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL ARADIX_ARRAY_API
#define NO_IMPORT_ARRAY
#include <numpy/arrayobject.h>

#include <algorithm>

namespace aradix {
namespace {

PyArrayObject *flat_array(const nb::object &object, int type) {
    if (!PyArray_Check(object.ptr()))
        throw nb::type_error("states and stack must be arrays");
    auto *array = reinterpret_cast<PyArrayObject *>(object.ptr());
    if (PyArray_TYPE(array) != type || PyArray_NDIM(array) != 1 || !PyArray_ISCARRAY(array))
        throw nb::value_error("states must be a flat uint8 array, stack a flat int32 one");
    return array;
}

}  // namespace

PageTable::PageTable(nb::object states, nb::object stack, int64_t page, int free)
    : page_size(page), states_array_(states), stack_array_(stack), free_(static_cast<uint8_t>(checked_state(free))) {
    PyArrayObject *state_items = flat_array(states_array_, NPY_UINT8), *stack_items = flat_array(stack_array_, NPY_INT32);
    num_pages = num_free = PyArray_SIZE(stack_items);
    if (PyArray_SIZE(state_items) != num_pages + 1 || page_size < 1)
        throw nb::value_error("one state a page and one for the padding, and a page of at least one slot");
    states_ = static_cast<uint8_t *>(PyArray_DATA(state_items));
    stack_ = static_cast<int32_t *>(PyArray_DATA(stack_items));
}

size_t PageTable::checked_state(int state) {
    if (state < 0 || state >= static_cast<int>(kNumStates))
        throw nb::value_error("no such state");
    return static_cast<size_t>(state);
}

nb::list PageTable::counts() const {
    nb::list list;
    for (int64_t count : counts_)
        append_to(list, integer(count));
    return list;
}

nb::object PageTable::take(int64_t num_slots, int state) {
    if (num_slots < 0 || num_slots % page_size != 0 || num_slots > free_slots())
        return nb::none();
    int64_t *out = nullptr;
    auto count = static_cast<size_t>(num_slots), size = static_cast<size_t>(page_size);
    nb::object slots = new_slots(count, out);
    pages_.resize(count / size);
    take_pages(pages_.data(), num_slots / page_size, state);
    slots_of(pages_.data(), 0, count, size, out);
    return slots;
}

bool PageTable::take_pages(int32_t *out, int64_t wanted, int state) {
    if (wanted < 0 || wanted > num_free)
        return false;
    counts_[checked_state(state)] += wanted;
    const int32_t *top = stack_ + num_free;
    for (int64_t index = 0; index < wanted; ++index)
        out[index] = top[-1 - index];
    num_free -= wanted;
    set_states(out, static_cast<size_t>(wanted), static_cast<uint8_t>(state));
    return true;
}

bool PageTable::give(nb::handle slots_object, int origin) {
    if (!PyArray_Check(slots_object.ptr()))
        return false;
    auto *array = reinterpret_cast<PyArrayObject *>(slots_object.ptr());
    if (PyArray_TYPE(array) != NPY_INT64 || PyArray_NDIM(array) != 1 || !PyArray_ISCARRAY_RO(array))
        return false;
    auto count = static_cast<size_t>(PyArray_SIZE(array)), size = static_cast<size_t>(page_size);
    pages_.resize(count / size);
    return pages_of(static_cast<const int64_t *>(PyArray_DATA(array)), count, size, pages_.data()) &&
           give_pages(pages_.data(), pages_.size(), origin);
}

bool PageTable::give_pages(const int32_t *pages, size_t count, int origin) {
    auto from = static_cast<uint8_t>(checked_state(origin));
    // A page that was named before is marked as free by now, so a second mention shows as well.
    if (size_t num_freed = free_while(pages, count, from); num_freed != count) {
        set_states(pages, num_freed, from);
        return false;
    }
    int32_t *top = stack_ + num_free;
    for (size_t index = 0; index < count; ++index)
        top[index] = pages[count - 1 - index];
    num_free += static_cast<int64_t>(count);
    counts_[from] -= static_cast<int64_t>(count);
    return true;
}

bool PageTable::has_all(const int32_t *pages, size_t count, int state) const {
    auto wanted = static_cast<uint8_t>(checked_state(state));
    for (size_t begin = 0; begin < count; begin += kPagesAtOnce) {
        size_t end = std::min(count, begin + kPagesAtOnce);
        if (end - begin == kPagesAtOnce && is_run_of(pages + begin, wanted))
            continue;
        for (size_t index = begin; index < end; ++index)
            if (!is_page_of(pages[index], wanted))
                return false;
    }
    return true;
}

bool PageTable::is_run_of(const int32_t *pages, uint8_t state) const {
    return follow_one_another(pages) && pages[0] >= 1 &&
           pages[0] + static_cast<int64_t>(kPagesAtOnce) - 1 <= num_pages && are_all(states_ + pages[0], state);
}

void PageTable::set_states(const int32_t *pages, size_t count, uint8_t state) {
    for (size_t begin = 0; begin < count; begin += kPagesAtOnce) {
        size_t end = std::min(count, begin + kPagesAtOnce);
        if (end - begin == kPagesAtOnce && follow_one_another(pages + begin)) {
            std::memset(states_ + pages[begin], state, kPagesAtOnce);
            continue;
        }
        for (size_t index = begin; index < end; ++index)
            states_[pages[index]] = state;
    }
}

size_t PageTable::free_while(const int32_t *pages, size_t count, uint8_t from) {
    for (size_t begin = 0; begin < count; begin += kPagesAtOnce) {
        size_t end = std::min(count, begin + kPagesAtOnce);
        if (end - begin == kPagesAtOnce && is_run_of(pages + begin, from)) {
            std::memset(states_ + pages[begin], free_, kPagesAtOnce);
            continue;
        }
        for (size_t index = begin; index < end; ++index) {
            if (!is_page_of(pages[index], from))
                return index;
            states_[pages[index]] = free_;
        }
    }
    return count;
}

nb::object PageTable::pop(int64_t wanted, int state) {
    if (wanted < 0 || wanted > num_free)
        throw nb::value_error("fewer pages are free");
    int64_t *out = nullptr;
    nb::object pages = new_slots(static_cast<size_t>(wanted), out);
    counts_[checked_state(state)] += wanted;
    for (int64_t index = 0; index < wanted; ++index) {
        out[index] = stack_[--num_free];
        states_[out[index]] = static_cast<uint8_t>(state);
    }
    return pages;
}

void PageTable::mark(nb::handle pages_object, int state, size_t &count) {
    Slots pages(pages_object);
    for (size_t index = 0; index < pages.size; ++index)
        if (pages.data[index] < 1 || pages.data[index] > num_pages)
            throw nb::index_error("no such page");
    auto marked = static_cast<uint8_t>(checked_state(state));
    for (size_t index = 0; index < pages.size; ++index)
        states_[pages.data[index]] = marked;
    count = pages.size;
}

void PageTable::push(nb::handle pages_object, int origin) {
    Slots pages(pages_object);
    if (static_cast<int64_t>(pages.size) > num_pages - num_free)
        throw nb::value_error("more pages than the pool has");
    size_t count = 0;
    mark(pages_object, free_, count);
    for (size_t index = count; index-- > 0;)
        stack_[num_free++] = static_cast<int32_t>(pages.data[index]);
    counts_[checked_state(origin)] -= static_cast<int64_t>(count);
}

void PageTable::move(nb::handle pages, int origin, int state) {
    size_t count = 0;
    mark(pages, state, count);
    counts_[checked_state(origin)] -= static_cast<int64_t>(count);
    counts_[checked_state(state)] += static_cast<int64_t>(count);
}

void PageTable::claim(nb::handle pages, int state) {
    size_t count = 0;
    mark(pages, state, count);
}

}  // namespace aradix

#include "page_table.hpp"

#include "python_records.hpp"

#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#define PY_ARRAY_UNIQUE_SYMBOL ARADIX_ARRAY_API
#define NO_IMPORT_ARRAY
#include <numpy/arrayobject.h>

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
    nb::object slots = new_slots(static_cast<size_t>(num_slots), out);
    take_run(out, num_slots, state);
    return slots;
}

bool PageTable::take_run(int64_t *out, int64_t num_slots, int state) {
    int64_t wanted = num_slots / page_size;
    if (num_slots < 0 || num_slots % page_size != 0 || wanted > num_free)
        return false;
    counts_[checked_state(state)] += wanted;
    for (int64_t index = 0; index < wanted; ++index) {
        int32_t page = stack_[--num_free];
        states_[page] = static_cast<uint8_t>(state);
        int64_t slot = page * page_size;
        for (int64_t offset = 0; offset < page_size; ++offset)
            *out++ = slot + offset;
    }
    return true;
}

bool PageTable::give(nb::handle slots_object, int origin) {
    if (!PyArray_Check(slots_object.ptr()))
        return false;
    auto *array = reinterpret_cast<PyArrayObject *>(slots_object.ptr());
    if (PyArray_TYPE(array) != NPY_INT64 || PyArray_NDIM(array) != 1 || !PyArray_ISCARRAY_RO(array))
        return false;
    return give_run(static_cast<const int64_t *>(PyArray_DATA(array)), static_cast<size_t>(PyArray_SIZE(array)), origin);
}

bool PageTable::give_run(const int64_t *slots, size_t count, int origin) {
    auto from = static_cast<uint8_t>(checked_state(origin));
    auto size = static_cast<size_t>(page_size);
    if (count % size != 0)
        return false;
    size_t given = count / size;
    pages_.resize(given);
    for (size_t index = 0; index < given; ++index) {
        const int64_t *run = slots + index * size;
        int64_t page = run[0];
        bool good = true;
        if (size != 1) {  // a division is slow, and with pages of one slot there would be one a slot
            page = run[0] / page_size;
            good = page * page_size == run[0];
            for (size_t offset = 1; good && offset < size; ++offset)
                good = run[offset] == run[0] + static_cast<int64_t>(offset);
        }
        // A page that was named before is marked as free by now, so a second mention shows here as well.
        if (!good || page < 1 || page > num_pages || states_[page] != from) {
            while (index-- > 0)
                states_[pages_[index]] = from;
            return false;
        }
        states_[page] = free_;
        pages_[index] = static_cast<int32_t>(page);
    }
    for (size_t index = given; index-- > 0;)
        stack_[num_free++] = pages_[index];
    counts_[from] -= static_cast<int64_t>(given);
    return true;
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

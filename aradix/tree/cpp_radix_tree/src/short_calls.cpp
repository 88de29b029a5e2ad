#include "short_calls.hpp"

namespace aradix {

ShortCalls::ShortCalls(nb::dict parts)
    : calls_(parts["calls"]), leases_(parts["leases"]), pool_(parts["pool"]), pressure_(parts["pressure"]),
      holds_(parts["holds"]), growth_(parts["growth"]), admission_(parts["admission"]), standing_(parts["standing"]),
      listening_(parts["listening"]), tree_object_(parts["tree"]), table_object_(parts["table"]),
      clock_(parts["clock"]), hold_type_(parts["hold_type"]), lease_type_(parts["lease_type"]),
      key_type_(parts["key_type"]), insert_result_(parts["insert_result"]), no_duplicates_(parts["no_duplicates"]),
      to_tensor_(parts["to_tensor"]), leases_type_(Py_TYPE(leases_.ptr())), pool_type_(Py_TYPE(pool_.ptr())),
      pressure_type_(Py_TYPE(pressure_.ptr())), tree_(nb::cast<Tree *>(tree_object_)),
      table_(nb::cast<PageTable *>(table_object_)), held_(nb::cast<int>(parts["held"])),
      item_bytes_(nb::cast<int64_t>(parts["item_bytes"])), low_slots_(nb::cast<int64_t>(parts["low_slots"])),
      max_run_(nb::cast<int64_t>(parts["max_run"])), listen_from_(nb::cast<int64_t>(parts["listen_from"])),
      key_slots_(key_type_), lease_slots_(lease_type_),
      plain_(calls_.type(), "_plain"), current_(calls_.type(), "_current"), token_(calls_.type(), "_token"),
      ask_task_(calls_.type(), "_ask_task"),
      run_length_(calls_.type(), "_run_length"), watch_(leases_.type(), "watch"),
      num_opened_(leases_.type(), "_num_opened"), num_queries_(leases_.type(), "num_queries"),
      num_query_tokens_(leases_.type(), "num_query_tokens"), num_hit_tokens_(leases_.type(), "num_hit_tokens"),
      num_evicted_(leases_.type(), "num_evicted"), num_resumes_(leases_.type(), "num_resumes"),
      num_held_(pool_.type(), "num_held"), is_timed_(pressure_.type(), "is_timed") {
    if (!PyDict_Check(holds_.ptr()) || !PyDict_Check(listening_.ptr()) || !PyList_Check(growth_.ptr()) ||
        !PyList_Check(admission_.ptr()) || !PyList_Check(standing_.ptr()))
        throw nb::type_error("holds and listening must be dicts, those who wait and the gates lists");
    auto *type = reinterpret_cast<PyTypeObject *>(hold_type_.ptr());
    if (!PyType_IsSubtype(type, reinterpret_cast<PyTypeObject *>(nb::type<Hold>().ptr())))
        throw nb::type_error("only compiled holds go the short way");
}

bool ShortCalls::is_plain() const {
    // A part that was made into something else may do something else.
    if (Py_TYPE(leases_.ptr()) != leases_type_ || Py_TYPE(pool_.ptr()) != pool_type_ ||
        Py_TYPE(pressure_.ptr()) != pressure_type_)
        return false;
    if (!plain_.is(calls_.ptr(), Py_True) || !watch_.is(leases_.ptr(), Py_None) ||
        !is_timed_.is(pressure_.ptr(), Py_False))
        return false;
    // Besides this cache nobody hears of slots, and in it nobody waits for any.
    if (PyDict_GET_SIZE(listening_.ptr()) != 1 || PyList_GET_SIZE(growth_.ptr()) != 0 ||
        PyList_GET_SIZE(admission_.ptr()) != 0 || PyList_GET_SIZE(standing_.ptr()) != 0)
        return false;
    return is_at_home();
}

bool ShortCalls::is_at_home() const {
    // Loops run each step in a context of its own, so what was true in this very context is true still. Asking again would
    // cost a system call: asyncio wants to know whether the process was forked.
    const PyThreadState *thread = PyThreadState_Get();
    if (thread->id == home_thread_ && thread->context_ver == home_context_)
        return true;
    PyObject *here = PyObject_CallNoArgs(current_.get(calls_.ptr()));
    if (here == nullptr) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
            throw nb::python_error();
        PyErr_Clear();  // no loop runs here
        return false;
    }
    Py_DECREF(here);
    if (!token_.is(calls_.ptr(), here))
        return false;
    home_thread_ = thread->id;
    home_context_ = thread->context_ver;
    return true;
}

nb::object ShortCalls::running_task() const {
    nb::object task = nb::steal(PyObject_CallNoArgs(ask_task_.get(calls_.ptr())));
    if (!task.is_valid()) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError))
            throw nb::python_error();
        PyErr_Clear();  // trio runs something that is no task
        return nb::none();
    }
    if (task.is_none())
        return task;
    nb::object reference = nb::steal(PyWeakref_NewRef(task.ptr(), nullptr));
    if (!reference.is_valid())
        throw nb::python_error();
    return reference;
}

void ShortCalls::count_query(Hold &hold) const {
    if (hold.counted)
        return;
    hold.counted = true;
    PyObject *leases = leases_.ptr();
    if (hold.resume) {
        num_resumes_.add(leases, 1);
        return;
    }
    num_queries_.add(leases, 1);
    num_query_tokens_.add(leases, key_slots_.num_items.number(hold.given.ptr()));
    num_hit_tokens_.add(leases, hold.num_matched);
}

void ShortCalls::tell_if_low() const {
    if (low_slots_ != 0 && table_->free_slots() < low_slots_ && tree_->evictable_tokens != 0)
        leases_.attr("after_take")();
}

nb::object ShortCalls::new_lease(nb::handle self, nb::handle cache, PyObject *key) {
    PyFrameObject *frame = PyEval_GetFrame();
    if (frame == nullptr || !is_key(key) || !is_plain())
        return nb::object();
    num_opened_.add(leases_.ptr(), 1);
    nb::object code = nb::steal(reinterpret_cast<PyObject *>(PyFrame_GetCode(frame)));
    nb::object hold = nb::inst_alloc(hold_type_);
    nb::object given = nb::borrow(key);
    new (nb::inst_ptr<Hold>(hold))
        Hold(num_opened_.number(leases_.ptr()), given, given, key_slots_.num_items.number(key), integer(0), true, false,
             nb::none(), std::move(code), PyFrame_GetLasti(frame), nb::cast<double>(clock_()), table_->page_size);
    nb::inst_mark_ready(hold);
    auto *type = reinterpret_cast<PyTypeObject *>(lease_type_.ptr());
    nb::object lease = nb::steal(type->tp_alloc(type, 0));
    if (!lease.is_valid())
        throw nb::python_error();
    lease_slots_.cache.set(lease.ptr(), nb::borrow(cache));
    lease_slots_.hold.set(lease.ptr(), std::move(hold));
    lease_slots_.reserve.set(lease.ptr(), nb::none());
    lease_slots_.forked.set(lease.ptr(), nb::bool_(false));
    lease_slots_.slots.set(lease.ptr(), nb::none());
    lease_slots_.slots_of.set(lease.ptr(), nb::none());
    lease_slots_.short_calls.set(lease.ptr(), nb::borrow(self));
    return lease;
}

bool ShortCalls::enter(PyObject *hold_object) {
    Hold *hold = plain_hold(hold_object);
    if (hold == nullptr || hold->opening || hold->entered || !is_plain() || !has_turn() || !tree_->enter_hold(*hold))
        return false;
    take_turn();
    hold->opening = hold->entered = hold->held = true;
    hold->task = running_task();
    if (PyDict_SetItem(holds_.ptr(), integer(hold->order).ptr(), hold_object) != 0)
        throw nb::python_error();
    return true;
}

bool ShortCalls::grow(PyObject *hold_object, PyObject *num_tokens) {
    Hold *hold = plain_hold(hold_object);
    if (hold == nullptr || !PyLong_CheckExact(num_tokens) || !hold->held || hold->waiting || !is_plain() || !has_turn())
        return false;
    int overflow = 0;
    int64_t count = PyLong_AsLongLongAndOverflow(num_tokens, &overflow);
    if (overflow != 0 || count < 0 || count > INT32_MAX)
        return false;
    std::optional<Growth> growth = tree_->grow_hold(*hold, *table_, count, held_);
    if (!growth.has_value())
        return false;
    num_held_.add(pool_.ptr(), growth->num_taken);
    num_evicted_.add(leases_.ptr(), growth->num_evicted);
    tell_if_low();
    if (!growth->grew)
        return false;
    count_query(*hold);
    take_turn();
    return true;
}

nb::object ShortCalls::publish(PyObject *hold_object, PyObject *key) {
    Hold *hold = plain_hold(hold_object);
    if (hold == nullptr || !is_key(key) || !hold->held || !is_plain())
        return nb::object();
    int64_t start = hold->published, num_known = key_slots_.num_items.number(hold->key.ptr());
    std::optional<Published> done = tree_->publish_hold(*hold, *table_, key, held_);
    if (!done.has_value())
        return nb::object();
    if (key_slots_.num_items.number(key) > num_known)
        hold->given = nb::borrow(key);
    nb::object spare = no_duplicates_;
    if (!done->duplicates.is_none()) {
        num_held_.add(pool_.ptr(), start - done->held);
        spare = to_tensor_(done->duplicates);
    }
    tell_if_low();
    const Records &records = tree_->records();
    nb::object repointed = nb::make_tuple(start, done->held);
    return records.make(insert_result_, integer(done->held), done->last, spare, integer(done->end - done->held),
                        repointed);
}

bool ShortCalls::leave(PyObject *hold_object) {
    Hold *hold = plain_hold(hold_object);
    if (hold == nullptr || hold->released || !hold->held || hold->waiting || !is_plain())
        return false;
    std::optional<int64_t> num_given = tree_->leave_hold(*hold, *table_, held_);
    if (!num_given.has_value())
        return false;
    hold->released = true;
    hold->held = false;
    nb::object order = integer(hold->order);
    if (PyDict_DelItem(holds_.ptr(), order.ptr()) != 0) {
        if (!PyErr_ExceptionMatches(PyExc_KeyError))
            throw nb::python_error();
        PyErr_Clear();
    }
    num_held_.add(pool_.ptr(), -*num_given);
    tell_if_low();
    return true;
}

nb::object ShortCalls::slots(PyObject *lease, PyObject *hold_object) {
    Hold *hold = plain_hold(hold_object);
    if (hold == nullptr || !hold->held || !is_plain())
        return nb::object();
    PyObject *known = lease_slots_.slots.get(lease), *known_of = lease_slots_.slots_of.get(lease);
    if (known != nullptr && known != Py_None && known_of != nullptr && PyTuple_CheckExact(known_of) &&
        PyTuple_GET_SIZE(known_of) == 3) {
        const int64_t state[] = {hold->node_id, hold->published, hold->version};
        bool same = true;
        for (Py_ssize_t index = 0; index < 3; ++index)
            same = same && PyLong_AsLongLong(PyTuple_GET_ITEM(known_of, index)) == state[index];
        if (same)
            return nb::borrow(known);
    }
    nb::object tensor = to_tensor_(tree_->slots_of_hold(*hold));
    lease_slots_.slots_of.set(
        lease, nb::make_tuple(integer(hold->node_id), integer(hold->published), integer(hold->version)));
    lease_slots_.slots.set(lease, tensor);
    return tensor;
}

bool ShortCalls::is_over(PyObject *hold_object) const {
    Hold *hold = plain_hold(hold_object);
    return hold != nullptr && !hold->held;
}

int ShortCalls::traverse(visitproc visit, void *arg) const {
    for (const nb::object *part :
         {&calls_, &leases_, &pool_, &pressure_, &holds_, &growth_, &admission_, &standing_, &listening_, &tree_object_,
          &table_object_, &clock_, &hold_type_, &lease_type_, &key_type_, &insert_result_, &no_duplicates_, &to_tensor_})
        Py_VISIT(part->ptr());
    return 0;
}

}  // namespace aradix

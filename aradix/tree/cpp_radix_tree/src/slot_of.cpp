#include "slot_of.hpp"

#include <structmember.h>

namespace aradix {

SlotOf::SlotOf(nb::handle type, const char *name) {
    nb::object member = nb::getattr(type, name);
    if (!Py_IS_TYPE(member.ptr(), &PyMemberDescr_Type) ||
        reinterpret_cast<PyMemberDescrObject *>(member.ptr())->d_member->type != T_OBJECT_EX)
        throw nb::type_error("not one of the __slots__ of that class");
    offset_ = reinterpret_cast<PyMemberDescrObject *>(member.ptr())->d_member->offset;
}

KeySlots::KeySlots(nb::handle type)
    : data(type, "data"), start(type, "start"), stop(type, "stop"), item_bytes(type, "item_bytes"),
      num_items(type, "num_items"), name_space(type, "namespace"), hashes(type, "_hashes"), bigrams(type, "_bigrams") {}

LeaseSlots::LeaseSlots(nb::handle type)
    : cache(type, "_cache"), hold(type, "_hold"), reserve(type, "_reserve"), forked(type, "_forked"),
      slots(type, "_slots"), slots_of(type, "_slots_of"), short_calls(type, "_short_calls") {}

}  // namespace aradix

"""What an undo needs: the log, and a record for each kind of place that a reload writes to."""

from tokenspeed_reload.undo.containers import (
    AddedEntry,
    DictContents,
    Entry,
    ListContents,
    SetContents,
    elements_of,
    items_of,
    replace_dict,
    replace_elements,
    set_item,
)
from tokenspeed_reload.undo.functions import (
    CacheClear,
    Cell,
    FunctionCode,
    FunctionState,
    MethodWrapper,
    cell_value,
    set_code,
)
from tokenspeed_reload.undo.log import MISSING, Record, UndoLog
from tokenspeed_reload.undo.objects import (
    ClassState,
    InstanceClass,
    InstanceSlots,
    InstanceState,
    set_class,
    set_members,
    slots_of,
)
from tokenspeed_reload.undo.places import Attribute, Exchange, LineCache, Participant, ParticipantState

__all__ = [
    "MISSING",
    "AddedEntry",
    "Attribute",
    "CacheClear",
    "Cell",
    "ClassState",
    "DictContents",
    "Entry",
    "Exchange",
    "FunctionCode",
    "FunctionState",
    "InstanceClass",
    "InstanceSlots",
    "InstanceState",
    "LineCache",
    "ListContents",
    "MethodWrapper",
    "Participant",
    "ParticipantState",
    "Record",
    "SetContents",
    "UndoLog",
    "cell_value",
    "elements_of",
    "items_of",
    "replace_dict",
    "replace_elements",
    "set_class",
    "set_code",
    "set_item",
    "set_members",
    "slots_of",
]

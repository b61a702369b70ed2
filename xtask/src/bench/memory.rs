//! Memory per thing: how much more is resident after making many of them, in a process that did nothing else.

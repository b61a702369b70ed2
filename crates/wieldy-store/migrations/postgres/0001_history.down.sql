DROP TABLE tallies;
DROP TABLE answers;
DROP TABLE words;
DROP TABLE tool_executions;
DROP TABLE heads;
DROP TABLE trail;
DROP TABLE events;
DROP TABLE instances;

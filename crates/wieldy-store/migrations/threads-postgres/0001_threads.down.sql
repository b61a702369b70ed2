DROP TABLE entries, threads, roll;
DROP FUNCTION refuse_change, refuse_shrinking;

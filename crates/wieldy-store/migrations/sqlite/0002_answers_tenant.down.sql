ALTER TABLE answers DROP COLUMN tenant;

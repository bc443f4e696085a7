-- Its parameters change.
drop function if exists penstock.scan(text, text[], jsonb, jsonb);
